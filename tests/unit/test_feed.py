"""Generation batches by number are those that the loader gives out, on every rank and in every epoch."""

import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

from colocate_rl.rollout.feed import BatchFeed
from colocate_rl.rollout.sampler import PROMPT_INDEX, RepeatSampler

ROWS = [{"prompt": str(number)} for number in range(23)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("world_size", "prompts", "copies", "repeats"), [(1, 4, 2, 1), (2, 4, 3, 2), (3, 6, 2, 4)])
def test_feed_and_loader_agree(world_size: int, prompts: int, copies: int, repeats: int, shuffle: bool) -> None:
    rows_per_rank = prompts * copies // world_size
    for rank in range(world_size):
        sampler = RepeatSampler(ROWS, copies, prompts, repeats, shuffle=shuffle, seed=5)
        shard = BatchSamplerShard(BatchSampler(sampler, rows_per_rank, drop_last=True), world_size, rank)
        given_out = [batch for _ in range(3) for batch in shard]  # three epochs
        feed = BatchFeed(
            ROWS,
            prompts_per_batch=prompts,
            num_generations=copies,
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            seed=5,
        )
        assert feed.batches_per_epoch == len(ROWS) // prompts
        assert len(given_out) == 3 * feed.batches_per_epoch * repeats
        for position, batch in enumerate(given_out):
            rows = feed.batch(position // repeats)
            assert [row[PROMPT_INDEX] for row in rows] == batch
            assert [row["prompt"] for row in rows] == [ROWS[index]["prompt"] for index in batch]
