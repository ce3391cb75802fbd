"""Which rows make a generation batch: whole groups, each batch as often as it is used, evaluation rows exactly once."""

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader

from colocate_rl.rollout.sampler import PROMPT_INDEX, EvalBlocks, NumberedRows, RepeatSampler

pytestmark = pytest.mark.unit

sizes = st.integers(1, 5)


@given(num_rows=st.integers(0, 20), group=sizes, chunk=sizes, repeat=sizes, shuffle=st.booleans())
def test_layout_and_length(num_rows: int, group: int, chunk: int, repeat: int, shuffle: bool) -> None:
    sampler = RepeatSampler(range(num_rows), group, chunk, repeat, shuffle=shuffle, seed=0)
    drawn = list(sampler)
    num_chunks = num_rows // chunk
    assert len(sampler) == len(drawn) == num_chunks * chunk * group * repeat
    per_chunk = chunk * group * repeat
    used = []
    for number in range(num_chunks):
        block = drawn[number * per_chunk : (number + 1) * per_chunk]
        prompts = block[: chunk * group : group]
        assert len(set(prompts)) == chunk, "a generation batch holds different prompts"
        once = [prompt for prompt in prompts for _ in range(group)]
        assert block == once * repeat, "each index G times in a row, the chunk repeated as a whole"
        used += prompts
    assert len(set(used)) == len(used), "no prompt twice in a pass"
    assert set(used) <= set(range(num_rows))
    if not shuffle:
        assert used == list(range(num_chunks * chunk))


def test_layout_by_hand() -> None:
    """5 prompts, 2 per generation batch, groups of 2, each batch used 3 times: the fifth prompt is left out."""
    sampler = RepeatSampler(range(5), 2, batch_size=2, repeat_count=3, shuffle=False)
    assert list(sampler) == [0, 0, 1, 1] * 3 + [2, 2, 3, 3] * 3
    assert len(sampler) == 24


def test_a_short_last_chunk_is_dropped_but_not_for_ever() -> None:
    """With 5 prompts and 4 per batch, one is left out of each pass, and not always the same."""
    sampler = RepeatSampler(range(5), 1, batch_size=4, seed=0)
    left_out = {(set(range(5)) - set(sampler)).pop() for _ in range(40)}
    assert left_out == set(range(5))


def test_too_few_prompts_give_nothing() -> None:
    sampler = RepeatSampler(range(3), 2, batch_size=4, seed=0)
    assert list(sampler) == []
    assert len(sampler) == 0


def test_each_pass_has_its_own_order() -> None:
    sampler = RepeatSampler(range(50), 1, seed=3)
    first, second = list(sampler), list(sampler)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(50))


def test_the_seed_alone_decides() -> None:
    def passes(seed: int, noise: int) -> list[list[int]]:
        sampler = RepeatSampler(range(30), 1, seed=seed)
        torch.manual_seed(noise)
        return [list(sampler), list(sampler)]

    assert passes(1, noise=0) == passes(1, noise=9)
    assert passes(1, noise=0) != passes(2, noise=0)


def test_the_order_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(RepeatSampler(range(30), 1, seed=3))
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_the_run_s_own_decides() -> None:
    def order(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return list(RepeatSampler(range(30), 1))

    assert order(4) == order(4)
    assert order(4) != order(5)


def test_set_epoch_equals_an_unbroken_run() -> None:
    unbroken = RepeatSampler(range(20), 2, batch_size=3, seed=7)
    passes = [list(unbroken) for _ in range(4)]
    for epoch in (3, 0, 2, 1):
        resumed = RepeatSampler(range(20), 2, batch_size=3, seed=7)
        resumed.set_epoch(epoch)
        assert list(resumed) == passes[epoch]
        if epoch < 3:
            assert list(resumed) == passes[epoch + 1]
    again = RepeatSampler(range(20), 2, batch_size=3, seed=7)
    for epoch in (1, 1, 0):
        again.set_epoch(epoch)
        assert list(again) == passes[epoch], "setting an epoch is not adding to it"


def test_numbered_rows_carry_their_index() -> None:
    rows = NumberedRows([{"prompt": "a", "x": 1}, {"prompt": "a", "x": 2}])
    assert len(rows) == 2
    assert rows[1] == {"prompt": "a", "x": 2, PROMPT_INDEX: 1}


# Evaluation


@given(
    num_prompts=st.integers(0, 23),
    copies=st.integers(1, 4),
    per_block=st.integers(1, 7),
    world_size=st.integers(1, 5),
)
def test_evaluation_blocks_hold_each_row_exactly_once(
    num_prompts: int, copies: int, per_block: int, world_size: int
) -> None:
    ranks = [EvalBlocks(num_prompts, copies, per_block, rank, world_size) for rank in range(world_size)]
    assert len({len(blocks) for blocks in ranks}) == 1, "every rank takes part in every block"
    assert all(len(list(blocks)) == len(blocks) for blocks in ranks)
    seen = Counter(row for blocks in ranks for block in blocks for row in block)
    assert seen == dict.fromkeys(range(num_prompts), copies)
    for together in zip(*ranks, strict=True):
        lengths = [len(block) for block in together]
        assert max(lengths) - min(lengths) <= 1
        joined = [row for block in together for row in block]
        assert joined == sorted(joined), "a group's copies are neighbours in the block"
        assert set(Counter(joined).values()) == {copies}, "groups are whole within a block"
        assert len(set(joined)) <= per_block


def test_evaluation_blocks_by_hand() -> None:
    """3 prompts x 2 copies, 2 prompts a block, 3 ranks: 4 rows then 2; the last rank sits one out."""
    ranks = [list(EvalBlocks(3, 2, 2, rank, 3)) for rank in range(3)]
    assert ranks == [[[0, 0], [2]], [[1], [2]], [[1], []]]


# As the trainer uses it: DataLoader, sharded over ranks by accelerate


def batches_of_rank(
    rank: int, world_size: int, *, num_rows: int, b: int, group: int, steps: int, iterations: int
) -> Iterator[list[int]]:
    """What the training loop of one rank draws: b * S rows at a time."""
    rows = NumberedRows([{"prompt": "same text everywhere"}] * num_rows)
    sampler = RepeatSampler(
        rows,
        mini_repeat_count=group,
        batch_size=b * world_size * steps // group,
        repeat_count=steps * iterations,
        seed=11,
    )
    loader: DataLoader[dict[str, object]] = DataLoader(
        rows, batch_size=b * steps, sampler=sampler, collate_fn=list, drop_last=True
    )
    assert isinstance(loader.batch_sampler, BatchSampler)
    shard = BatchSamplerShard(loader.batch_sampler, world_size, rank)
    for numbers in shard:
        yield [rows[number][PROMPT_INDEX] for number in numbers]


LAYOUTS = [
    (world_size, b, group, steps, iterations)
    for world_size, b, group, steps, iterations in itertools.product(
        (1, 2, 3, 4), (1, 2, 3, 4), (2, 3, 4, 6, 8), (1, 2, 3), (1, 2)
    )
    if b * world_size * steps % group == 0
]


def test_layouts_include_groups_that_straddle_ranks_and_micro_batches() -> None:
    assert (2, 3, 6, 2, 1) in LAYOUTS
    assert any(b % group for _, b, group, _, _ in LAYOUTS)
    assert any(b * steps % group for _, b, group, steps, _ in LAYOUTS)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_groups_are_whole_and_batches_repeat_on_every_rank(world_size: int) -> None:
    for layout in LAYOUTS:
        if layout[0] == world_size:
            check_layout(*layout)


def check_layout(world_size: int, b: int, group: int, steps: int, iterations: int) -> None:
    prompts = b * world_size * steps // group
    num_rows = 2 * prompts + min(1, prompts - 1)  # two generation batches, and a rest that is dropped
    ranks = [
        list(
            batches_of_rank(
                rank,
                world_size,
                num_rows=num_rows,
                b=b,
                group=group,
                steps=steps,
                iterations=iterations,
            )
        )
        for rank in range(world_size)
    ]
    uses = steps * iterations
    assert [len(batches) for batches in ranks] == [2 * uses] * world_size
    generations = []
    for number in range(2):
        span = range(number * uses, (number + 1) * uses)
        for batches in ranks:
            first = batches[number * uses]
            assert len(first) == b * steps
            assert all(batches[use] == first for use in span), "one generation batch, S x mu times"
        together = Counter(row for batches in ranks for row in batches[number * uses])
        assert set(together.values()) == {group}, "every group is whole within the generation batch"
        assert len(together) == prompts
        generations.append(set(together))
    assert not generations[0] & generations[1], "the next generation batch has other prompts"


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_every_rank_draws_the_same_number_of_batches(data: st.DataObject) -> None:
    """Also where the data set is no multiple of the batch: a rank that ran out would hang the others."""
    world_size, b, group, steps, iterations = data.draw(st.sampled_from(LAYOUTS))
    prompts = b * world_size * steps // group
    num_rows = data.draw(st.integers(prompts, 4 * prompts + 3))
    lengths = [
        len(
            list(
                batches_of_rank(
                    rank,
                    world_size,
                    num_rows=num_rows,
                    b=b,
                    group=group,
                    steps=steps,
                    iterations=iterations,
                )
            )
        )
        for rank in range(world_size)
    ]
    assert lengths == [num_rows // prompts * steps * iterations] * world_size
