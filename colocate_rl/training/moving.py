"""What of the objective moves while a run trains: the reference model and the weight of the entropy bonus.

Both change at the end of an optimizer step, alike on every rank, and travel with checkpoints, so that a resumed run
goes on from where they stood.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from torch import nn

from colocate_rl.collectives import Collectives
from colocate_rl.errors import DataError
from colocate_rl.metrics import MetricBuffer

REFERENCE_FILE = "reference.safetensors"
ENTROPY_FILE = "entropy_ctrl_state.json"
"""As in TRL."""


class MovingReference:
    """A reference model that follows the policy: TR-DPO's soft update (Gorbatovski et al. 2024, arXiv 2404.09656).

    Args:
        reference: the model; its parameters have the policy's names and shapes.
        mixup: alpha, the policy's share in reference <- alpha policy + (1 - alpha) reference.
        every: tau, optimizer steps between two updates.
    """

    def __init__(self, reference: nn.Module, mixup: float, every: int) -> None:
        self._reference = reference
        self._mixup = mixup
        self._every = every

    @torch.no_grad()
    def follow(self, policy: nn.Module, step: int) -> None:
        """Updates the reference if optimizer step ``step`` is one of those that do."""
        if step % self._every:
            return
        target = dict(self._reference.named_parameters())
        for name, weight in policy.named_parameters():
            target.pop(name).mul_(1 - self._mixup).add_(weight, alpha=self._mixup)
        assert not target, f"the policy has no parameters {sorted(target)}"

    def save(self, folder: Path) -> None:
        """Writes the reference into a checkpoint."""
        save_model(self._reference, str(folder / REFERENCE_FILE))

    def load(self, folder: Path) -> None:
        """Takes the reference of a checkpoint.

        Raises:
            DataError: when the checkpoint has none.
        """
        file = _existing(folder / REFERENCE_FILE, "sync_ref_model", "the reference would start from the first policy")
        load_model(self._reference, file, device=str(next(self._reference.parameters()).device))


class EntropyBonus:
    """The weight of the entropy bonus; adaptive control after Skywork-OR1 (He et al. 2025, arXiv 2505.22312).

    Adaptive: after each optimizer step the weight grows by ``delta`` if the step's mean token entropy (over all ranks)
    was at or below ``target`` and shrinks by it otherwise. It is applied only in steps after one with an entropy at or
    below the target, so never in the first.

    Args:
        coefficient: the weight, or with a target the first one.
        target: nats per token; None: the weight stays as it is.
        delta: step of the weight.
        bounds: smallest and largest weight.
    """

    def __init__(
        self,
        coefficient: float,
        *,
        target: float | None = None,
        delta: float = 0.005,
        bounds: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        self.coefficient = coefficient
        self._target = target
        self._delta = delta
        self._bounds = bounds
        self._last_entropy = math.inf
        self._seen: list[torch.Tensor] = []

    @property
    def is_adaptive(self) -> bool:
        """Whether there is anything to observe."""
        return self._target is not None

    @property
    def applied(self) -> float:
        """The weight in the loss of the step that runs now."""
        return self.coefficient if self._target is None or self._last_entropy <= self._target else 0.0

    def observe(self, entropy: torch.Tensor, chosen: torch.Tensor) -> None:
        """Adds the chosen tokens' entropies (both [B, T]) of a micro-batch that is trained on."""
        if self.is_adaptive:
            total = (entropy.detach().double() * chosen).sum()
            self._seen.append(torch.stack([total, chosen.sum().double()]))

    def end_step(self, collectives: Collectives) -> None:
        """Adapts the weight to the step that ends now; every rank must call it."""
        if self._target is None:
            return
        seen = torch.stack(self._seen).sum(0) if self._seen else torch.zeros(2, dtype=torch.float64)
        self._seen.clear()
        total, count = collectives.sum(seen).tolist()
        self._last_entropy = total / max(count, 1.0)
        change = self._delta if self._last_entropy <= self._target else -self._delta
        low, high = self._bounds
        self.coefficient = min(max(self.coefficient + change, low), high)

    def forget(self) -> None:
        """Drops what was observed in a step that did not end."""
        self._seen.clear()

    def save(self, folder: Path) -> None:
        """Writes the state into a checkpoint."""
        state = {"entropy_coef": self.coefficient, "last_world_entropy": self._last_entropy}
        (folder / ENTROPY_FILE).write_text(json.dumps(state))

    def load(self, folder: Path) -> None:
        """Takes the state of a checkpoint.

        Raises:
            DataError: when the checkpoint has none.
        """
        file = _existing(folder / ENTROPY_FILE, "use_adaptive_entropy", "the entropy bonus would start afresh")
        state = json.loads(file.read_text())
        self.coefficient, self._last_entropy = state["entropy_coef"], state["last_world_entropy"]


def _existing(file: Path, setting: str, otherwise: str) -> Path:
    if not file.is_file():
        raise DataError(
            f"Checkpoint {str(file.parent)!r} has no {file.name}: it was saved by a run without {setting}=True, and "
            f"{otherwise}. Resume without the setting, or start a new run from the checkpoint's weights."
        )
    return file


class MovingParts:
    """Both of the above, where a run has them.

    Args:
        collectives: of the training ranks.
        reference: None: it stays as it is, or there is none.
        bonus: None: there is none.
    """

    def __init__(
        self, collectives: Collectives, reference: MovingReference | None = None, bonus: EntropyBonus | None = None
    ) -> None:
        self.reference = reference
        self.bonus = bonus
        self._collectives = collectives

    def end_step(self, policy: nn.Module, step: int, metrics: MetricBuffer) -> None:
        """Moves everything at the end of optimizer step ``step`` (counted from 1); every rank must call it."""
        if self.reference is not None:
            self.reference.follow(policy, step)
        if self.bonus is not None:
            self.bonus.end_step(self._collectives)
            metrics.mean("entropy_coef", self.bonus.coefficient)

    def forget(self) -> None:
        """Drops what a step that did not end has left."""
        if self.bonus is not None:
            self.bonus.forget()

    def save(self, folder: Path) -> None:
        """Writes what moves into a checkpoint; on the rank that saves only."""
        for part in self._stored():
            folder.mkdir(parents=True, exist_ok=True)
            part.save(folder)

    def load(self, folder: Path) -> None:
        """Takes what moves from a checkpoint; every rank must call it."""
        with self._collectives.failing_together("resuming the objective"):
            for part in self._stored():
                part.load(folder)

    def _stored(self) -> list[MovingReference | EntropyBonus]:
        bonus = self.bonus if self.bonus is not None and self.bonus.is_adaptive else None
        return [part for part in (self.reference, bonus) if part is not None]
