"""Which rows make a generation batch, and in which order: groups are whole, and carry an index."""

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from colocate_rl.placement import split_evenly

PROMPT_INDEX = "_prompt_index"
"""Key under which a row carries its index in the data set: rows with the same one form a group."""


class PromptBatches:
    """Which prompts make which generation batch: each epoch has an order of its own, which is cut into whole batches.

    Args:
        num_prompts: of the data set.
        size: prompts of a generation batch; the short last one of an epoch is dropped.
        shuffle: permute them; False: every epoch has the order of the data set.
        seed: of the permutations, which one generator draws one after the other.
    """

    def __init__(self, num_prompts: int, size: int, *, shuffle: bool, seed: int) -> None:
        self.per_epoch = num_prompts // size
        """Generation batches of an epoch."""
        self._num_prompts = num_prompts
        self._size = size
        self._shuffle = shuffle
        self._seed = seed
        self._newest: tuple[int, Sequence[int]] = (-1, [])

    def of(self, number: int) -> Sequence[int]:
        """Indices of the prompts of a generation batch, counted from the start of the run."""
        epoch, place = divmod(number, self.per_epoch)
        return self._order(epoch)[place * self._size : (place + 1) * self._size]

    def _order(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(self._num_prompts)
        if self._newest[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed)
            for _ in range(epoch + 1):
                permutation = torch.randperm(self._num_prompts, generator=generator)
            self._newest = (epoch, permutation.tolist())
        return self._newest[1]


class RepeatSampler(Sampler[int]):
    """Yields each prompt's index G times in a row, and each generation batch as often as it is used.

    Each pass takes the batches of the next epoch (:class:`PromptBatches`), ``repeat_count`` times each.

    Args:
        data_source: anything with a length.
        mini_repeat_count: times each index is repeated in a row (G).
        batch_size: prompts per generation batch.
        repeat_count: times each generation batch is repeated (steps_per_generation x num_iterations).
        shuffle: permute the indices in each pass.
        seed: of the permutations; None draws one from torch's global generator.
    """

    def __init__(
        self,
        data_source: Sized,
        mini_repeat_count: int,
        batch_size: int = 1,
        repeat_count: int = 1,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        self.data_source = data_source
        self.num_samples = len(data_source)
        self.mini_repeat_count = mini_repeat_count
        self.batch_size = batch_size
        self.repeat_count = repeat_count
        self.shuffle = shuffle
        seed = seed if seed is not None else int(torch.initial_seed() % 2**63)
        self._batches = PromptBatches(self.num_samples, batch_size, shuffle=shuffle, seed=seed)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass the one that an unbroken run would make in ``epoch`` (0, 1, ...)."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        first = self._epoch * self._batches.per_epoch
        self._epoch += 1
        for number in range(first, first + self._batches.per_epoch):
            prompts = self._batches.of(number)
            for _ in range(self.repeat_count):
                for index in prompts:
                    for _ in range(self.mini_repeat_count):
                        yield index

    def __len__(self) -> int:
        return self._batches.per_epoch * self.batch_size * self.mini_repeat_count * self.repeat_count


class NumberedRows(Dataset[dict[str, Any]]):
    """A data set whose rows know their own index (under :data:`PROMPT_INDEX`)."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.rows[index], PROMPT_INDEX: index}


class EvalBlocks(Sampler[list[int]]):
    """Cuts an evaluation set into blocks for one rank: each (prompt, copy) once, the same number of blocks everywhere.

    Blocks may differ by one row between ranks, and be empty on some: nothing is padded or repeated.

    Args:
        num_prompts: length of the evaluation set.
        num_copies: completions per prompt.
        prompts_per_block: prompts that all ranks together handle in a block.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(self, num_prompts: int, num_copies: int, prompts_per_block: int, rank: int, world_size: int) -> None:
        self.blocks: list[list[int]] = []
        for start in range(0, num_prompts, prompts_per_block):
            prompts = range(start, min(start + prompts_per_block, num_prompts))
            rows: Sequence[int] = [prompt for prompt in prompts for _ in range(num_copies)]
            mine = split_evenly(len(rows), world_size)[rank]
            self.blocks.append([rows[position] for position in mine])

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)
