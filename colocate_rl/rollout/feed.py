"""Generation batches by number: what a rank will be asked to train on, before the loader gives it out."""

import zlib
from collections.abc import Iterator
from typing import Any

import torch

from colocate_rl.rollout.sampler import NumberedRows, PromptBatches


class BatchFeed:
    """The rows of any generation batch of the run, those that :class:`colocate_rl.rollout.sampler.RepeatSampler` gives.

    Args:
        rows: the data set.
        prompts_per_batch: prompts of a generation batch, over all ranks.
        num_generations: copies of each (G).
        rank: this rank.
        world_size: number of ranks; each takes consecutive rows.
        shuffle: permute the prompts in each epoch.
        seed: of the permutations.
    """

    def __init__(
        self,
        rows: Any,
        *,
        prompts_per_batch: int,
        num_generations: int,
        rank: int,
        world_size: int,
        shuffle: bool,
        seed: int,
    ) -> None:
        self._rows = NumberedRows(rows)
        self._num_generations = num_generations
        self._rank = rank
        self._share = prompts_per_batch * num_generations // world_size
        self._seed = seed
        self._batches = PromptBatches(len(rows), prompts_per_batch, shuffle=shuffle, seed=seed)

    @property
    def batches_per_epoch(self) -> int:
        """Whole generation batches in the data set."""
        return self._batches.per_epoch

    def batch(self, number: int) -> list[dict[str, Any]]:
        """This rank's rows of generation batch ``number``, counted from the start of the run."""
        indices = [index for index in self._batches.of(number) for _ in range(self._num_generations)]
        mine = indices[self._rank * self._share : (self._rank + 1) * self._share]
        return [self._rows[index] for index in mine]

    def spares(self, number: int) -> Iterator[dict[str, Any]]:
        """Rows of prompts that are not in generation batch ``number``, on all ranks in the same random order.

        The order depends on the seed and ``number`` alone: a resumed run replaces groups by the same prompts, and the
        order of generation batches does not know about it.
        """
        taken = set(self._batches.of(number))
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed}/spares/{number}".encode()))
        for index in torch.randperm(len(self._rows), generator=generator).tolist():
            if index not in taken:
                yield self._rows[index]
