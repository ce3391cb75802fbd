"""Generation batches of a data set that is read in order and has no length: the same ones on every rank."""

import itertools
from collections.abc import Iterator
from typing import Any

import datasets
from torch.utils.data import IterableDataset

from colocate_rl.errors import DataError
from colocate_rl.placement import split_evenly
from colocate_rl.rollout.sampler import PROMPT_INDEX


def numbered(rows: Any) -> Iterator[dict[str, Any]]:
    """Rows with their place in this pass under :data:`colocate_rl.rollout.sampler.PROMPT_INDEX`."""
    for index, row in enumerate(rows):
        yield {**row, PROMPT_INDEX: index}


class StreamFeed:
    """The rows of any generation batch of the run, read in order; every rank reads the same stream.

    A pass that ends begins anew (shuffled otherwise), so that a run is as long as its number of steps says. The rows
    that do not fill a last generation batch are dropped, as in a data set with a length.

    Args:
        rows: a streaming data set.
        prompts_per_batch: prompts of a generation batch, over all ranks.
        num_generations: copies of each (G).
        rank: this rank.
        world_size: number of ranks; each takes consecutive rows.
    """

    batches_per_epoch = None
    """A stream has no epochs."""

    def __init__(
        self,
        rows: datasets.IterableDataset,
        *,
        prompts_per_batch: int,
        num_generations: int,
        rank: int,
        world_size: int,
    ) -> None:
        self._rows = rows
        self._prompts_per_batch = prompts_per_batch
        self._num_generations = num_generations
        share = prompts_per_batch * num_generations // world_size
        self._mine = slice(rank * share, (rank + 1) * share)
        self._batches = self._read()
        self._last: tuple[int, list[dict[str, Any]]] = (-1, [])

    def batch(self, number: int) -> list[dict[str, Any]]:
        """This rank's rows of generation batch ``number``; one that lies behind is found by reading from the start."""
        if number < self._last[0]:
            self._batches, self._last = self._read(), (-1, [])
        while self._last[0] < number:
            self._last = (self._last[0] + 1, next(self._batches))
        return self._last[1]

    def _read(self) -> Iterator[list[dict[str, Any]]]:
        for number in itertools.count():
            self._rows.set_epoch(number)
            rows = numbered(self._rows)
            found = False
            while len(prompts := list(itertools.islice(rows, self._prompts_per_batch))) == self._prompts_per_batch:
                found = True
                yield [row for row in prompts for _ in range(self._num_generations)][self._mine]
            if not found:
                raise DataError(
                    f"train_dataset, a stream, ended after {len(prompts)} prompt(s), but one generation batch takes "
                    f"{self._prompts_per_batch} different ones. Add prompts, or lower per_device_train_batch_size, "
                    "steps_per_generation or gradient_accumulation_steps."
                )


class StreamBatches(IterableDataset[list[dict[str, Any]]]):
    """What a loader yields: each generation batch of a stream as often as it is used, without end.

    Args:
        feed: reads the stream for this loader alone.
        repeat_count: times each generation batch is used.
    """

    def __init__(self, feed: StreamFeed, repeat_count: int) -> None:
        self._feed = feed
        self._repeat_count = repeat_count

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        for number in itertools.count():
            rows = self._feed.batch(number)
            for _ in range(self._repeat_count):
                yield rows


class StreamEvalBlocks(IterableDataset[list[dict[str, Any]]]):
    """Cuts an evaluation stream into blocks for one rank, as :class:`colocate_rl.rollout.sampler.EvalBlocks` does.

    Args:
        rows: a streaming data set that ends.
        num_copies: completions per prompt.
        prompts_per_block: prompts that all ranks together handle in a block.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(
        self, rows: datasets.IterableDataset, num_copies: int, prompts_per_block: int, rank: int, world_size: int
    ) -> None:
        self._rows = rows
        self._num_copies = num_copies
        self._prompts_per_block = prompts_per_block
        self._rank, self._world_size = rank, world_size

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        rows = numbered(self._rows)
        while prompts := list(itertools.islice(rows, self._prompts_per_block)):
            copies = [row for row in prompts for _ in range(self._num_copies)]
            mine = split_evenly(len(copies), self._world_size)[self._rank]
            yield [copies[place] for place in mine]
