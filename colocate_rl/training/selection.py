"""Which tokens have entropy high enough to be learned from (Wang et al. 2025, "Beyond the 80/20 Rule", 2506.01939)."""

from dataclasses import dataclass

import numpy as np
import torch

from colocate_rl.collectives import Collectives


@dataclass(frozen=True, slots=True)
class EntropySelection:
    """Keeps the top share of tokens by entropy, counted over the slices that all ranks train on at the same time.

    Args:
        share: rho, 0 to 1; 0 keeps only the tokens with the largest entropy of all.
        collectives: of the training ranks.
    """

    share: float
    collectives: Collectives

    def select(self, entropy: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Tokens whose entropy is at least the (1 - share) quantile; every rank calls it once per slice.

        Args:
            entropy: float32 [B, T], of the whole slice.
            mask: bool [B, T], tokens in the loss.

        Returns:
            bool [B, T], False outside ``mask``.
        """
        everywhere = torch.cat(self.collectives.gather_ragged(entropy.detach()[mask]))
        if not len(everywhere):
            return torch.zeros_like(mask)
        threshold = float(np.quantile(everywhere.double().numpy(), 1 - self.share))
        return (entropy.detach().double() >= threshold) & mask
