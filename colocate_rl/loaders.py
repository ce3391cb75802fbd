"""The loaders that feed rows to a rank: generation batches in training, every row once in evaluation."""

from collections.abc import Iterator, Sequence
from typing import Any

import datasets
from torch.utils.data import DataLoader

from colocate_rl.collectives import Collectives
from colocate_rl.config import GRPOConfig
from colocate_rl.rollout.feed import BatchFeed
from colocate_rl.rollout.sampler import EvalBlocks, NumberedRows, RepeatSampler
from colocate_rl.rollout.stages import Row
from colocate_rl.rollout.unsized import StreamBatches, StreamEvalBlocks, StreamFeed


def as_list(rows: list[Any]) -> list[Any]:
    """A collator that leaves rows alone: they stay rows until they are a rollout."""
    return rows


def _stream_feed(args: GRPOConfig, rows: datasets.IterableDataset, collectives: Collectives) -> StreamFeed:
    return StreamFeed(
        rows.shuffle(seed=_order_seed(args)) if args.shuffle_dataset else rows,
        prompts_per_batch=args.prompts_per_batch,
        num_generations=args.num_generations,
        rank=collectives.rank,
        world_size=collectives.world_size,
    )


def _order_seed(args: GRPOConfig) -> int:
    return args.data_seed if args.data_seed is not None else args.seed


def train_loader(args: GRPOConfig, rows: datasets.Dataset) -> tuple[DataLoader[Row], RepeatSampler]:
    """The loader of all ranks' rows (accelerate gives each its part), and its sampler.

    It yields one generation batch after the other, each as often as it is used, in batches of one rank's share.
    """
    assert args.steps_per_generation is not None
    numbered = NumberedRows(rows)
    sampler = RepeatSampler(
        numbered,
        mini_repeat_count=args.num_generations,
        batch_size=args.prompts_per_batch,
        repeat_count=args.micro_batches_per_rollout,
        shuffle=args.shuffle_dataset,
        seed=_order_seed(args),
    )
    loader: DataLoader[Row] = DataLoader(
        numbered,
        batch_size=args.per_device_train_batch_size * args.steps_per_generation,
        sampler=sampler,
        collate_fn=as_list,
        num_workers=args.dataloader_num_workers,
        drop_last=True,
    )
    return loader, sampler


def stream_loader(args: GRPOConfig, rows: datasets.IterableDataset, collectives: Collectives) -> DataLoader[Row]:
    """The loader of a stream; unlike that of :func:`train_loader` it yields this rank's rows alone, and has no end."""
    batches = StreamBatches(_stream_feed(args, rows, collectives), args.micro_batches_per_rollout)
    return DataLoader(batches, batch_size=None, collate_fn=as_list)  # type: ignore[arg-type]  # its items are lists


def batch_feed(
    args: GRPOConfig, rows: datasets.Dataset | datasets.IterableDataset, collectives: Collectives
) -> BatchFeed | StreamFeed:
    """The same rows by the number of their generation batch, for a schedule that looks ahead."""
    if isinstance(rows, datasets.IterableDataset):
        return _stream_feed(args, rows, collectives)
    return BatchFeed(
        rows,
        prompts_per_batch=args.prompts_per_batch,
        num_generations=args.num_generations,
        rank=collectives.rank,
        world_size=collectives.world_size,
        shuffle=args.shuffle_dataset,
        seed=_order_seed(args),
    )


class TrainingRows:
    """The rows that this rank trains on, given out by a loader and by the number of their generation batch.

    Args:
        args: the run's configuration.
        rows: the training set.
        collectives: of the training ranks.
    """

    def __init__(
        self, args: GRPOConfig, rows: datasets.Dataset | datasets.IterableDataset, collectives: Collectives
    ) -> None:
        self._args = args
        self._feed = batch_feed(args, rows, collectives)
        self._sampler: RepeatSampler | None = None
        self.is_stream = isinstance(rows, datasets.IterableDataset)
        """The loader then gives this rank's rows alone; else it gives all ranks', of which accelerate picks."""
        if isinstance(rows, datasets.IterableDataset):
            self.loader = stream_loader(args, rows, collectives)
        else:
            self.loader, self._sampler = train_loader(args, rows)

    def set_epoch(self, epoch: int) -> None:
        """Gives an epoch its own order of prompts, the same one after a resume; a stream does so itself."""
        if self._sampler is not None:
            self._sampler.set_epoch(epoch)

    def micro_steps_at(self, global_step: int) -> int:
        """Micro-batches trained up to an optimizer step; an epoch's last step may have fewer than the others."""
        accumulation = self._args.gradient_accumulation_steps
        if self._feed.batches_per_epoch is None:
            return global_step * accumulation
        per_epoch = self._feed.batches_per_epoch * self._args.micro_batches_per_rollout
        epochs, steps = divmod(global_step, -(-per_epoch // accumulation))
        return epochs * per_epoch + steps * accumulation

    def of(self, number: int, max_steps: int) -> Sequence[Row] | None:
        """Those of generation batch ``number``, or None past the end of a run of ``max_steps`` optimizer steps."""
        if number * self._args.micro_batches_per_rollout >= self.micro_steps_at(max_steps):
            return None
        return self._feed.batch(number)

    def spares(self, number: int) -> Iterator[Row]:
        """See :meth:`colocate_rl.rollout.feed.BatchFeed.spares`; a stream has none."""
        assert isinstance(self._feed, BatchFeed)
        return self._feed.spares(number)


def eval_loader(
    args: GRPOConfig, rows: datasets.Dataset | datasets.IterableDataset, collectives: Collectives
) -> DataLoader[Row]:
    """The loader of this rank's share of the evaluation rows, each (prompt, copy) on exactly one rank."""
    assert args.generation_batch_size is not None
    assert args.num_generations_eval is not None
    shape = (
        args.num_generations_eval,
        max(1, args.generation_batch_size // args.num_generations_eval),
        collectives.rank,
        collectives.world_size,
    )
    if isinstance(rows, datasets.IterableDataset):
        return DataLoader(StreamEvalBlocks(rows, *shape), batch_size=None, collate_fn=as_list)  # type: ignore[arg-type]
    blocks = EvalBlocks(len(rows), *shape)
    return DataLoader(NumberedRows(rows), batch_sampler=blocks, collate_fn=as_list)
