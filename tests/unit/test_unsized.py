"""Streams give every rank its part of the same batches, again after a restart, and pass after pass."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from colocate_rl import GRPOConfig, loaders
from colocate_rl.collectives import Collectives
from colocate_rl.errors import ConfigError, DataError
from colocate_rl.preflight import Given, check_run
from colocate_rl.rollout.sampler import PROMPT_INDEX
from colocate_rl.rollout.unsized import StreamBatches, StreamEvalBlocks, StreamFeed
from tests.tiny import save_tiny

pytestmark = pytest.mark.unit

NUM_ROWS = 11


def rows(count: int = NUM_ROWS, known_columns: bool = True) -> datasets.IterableDataset:
    def generate() -> Iterator[dict[str, Any]]:
        for number in range(count):
            yield {"prompt": f"{number}=", "answer": number}

    if known_columns:
        return datasets.Dataset.from_list(list(generate())).to_iterable_dataset()
    return datasets.IterableDataset.from_generator(generate)


def feed(stream: datasets.IterableDataset, rank: int, world_size: int, prompts: int = 4, copies: int = 3) -> StreamFeed:
    return StreamFeed(stream, prompts_per_batch=prompts, num_generations=copies, rank=rank, world_size=world_size)


def answers(found: list[dict[str, Any]]) -> list[int]:
    return [row["answer"] for row in found]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_batches_in_order_and_a_short_tail_is_dropped(world_size: int) -> None:
    feeds = [feed(rows(), rank, world_size) for rank in range(world_size)]
    for number in range(5):  # two batches of four prompts a pass
        whole = [row for each in feeds for row in each.batch(number)]
        first = number % 2 * 4
        expected = [prompt for prompt in range(first, first + 4) for _ in range(3)]
        assert answers(whole) == expected
        assert [row[PROMPT_INDEX] for row in whole] == expected
        assert len({len(each.batch(number)) for each in feeds}) == 1


def test_each_pass_is_shuffled_otherwise_and_alike_on_all_ranks() -> None:
    def order(rank: int) -> list[int]:
        each = feed(rows().shuffle(seed=5, buffer_size=100), rank, 2, prompts=2, copies=2)
        return [number for place in range(10) for number in answers(each.batch(place))]

    first, second = order(0), order(1)
    whole = [pair for places in zip(first[::2], second[::2], strict=True) for pair in places]
    passes = [whole[:10], whole[10:]]
    assert all(len(set(each)) == 10 for each in passes)
    assert passes[0] != passes[1]
    assert passes[0] != sorted(passes[0])


def test_a_batch_behind_is_found_by_reading_again() -> None:
    each = feed(rows().shuffle(seed=5, buffer_size=100), 0, 1)
    before = [answers(each.batch(number)) for number in range(5)]
    assert answers(each.batch(4)) == before[4]
    assert [answers(each.batch(number)) for number in (1, 3, 0)] == [before[1], before[3], before[0]]


def test_a_stream_shorter_than_a_batch() -> None:
    with pytest.raises(DataError, match=r"ended after 3 prompt\(s\), but one generation batch takes 4"):
        feed(rows(3), 0, 1).batch(0)


def make_args(folder: Path, **changes: Any) -> GRPOConfig:
    values: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 2,
        "max_completion_length": 4,
        "max_steps": 3,
        "seed": 7,
    }
    return GRPOConfig(str(folder), **{**values, **changes})


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_loader_repeats_batches_as_a_map_style_one(tmp_path: Path, shuffle: bool) -> None:
    args = make_args(tmp_path, num_iterations=2, shuffle_dataset=shuffle)
    loader = loaders.stream_loader(args, rows(), Collectives(torch.device("cpu")))
    given = [answers(batch) for batch in islice(loader, 12)]
    assert given[0] == given[1] == given[2] == given[3]  # 2 steps per generation x 2 iterations
    assert given[4] != given[0]
    lookahead = loaders.batch_feed(args, rows(), Collectives(torch.device("cpu")))
    assert [answers(lookahead.batch(number)) for number in range(3)] == given[::4]
    assert (given[0] == [0, 0, 1, 1, 2, 2, 3, 3]) is not shuffle


def test_a_loader_holds_one_worker_for_each_batch() -> None:
    batches = StreamBatches(feed(rows(), 0, 1), 3)
    assert [answers(batch) for batch in islice(batches, 3)] == [answers(feed(rows(), 0, 1).batch(0))] * 3


@pytest.mark.parametrize(("world_size", "block"), [(1, 4), (2, 3), (3, 2), (4, 100)])
def test_evaluation_blocks_hold_each_copy_once(world_size: int, block: int) -> None:
    ranks = [list(StreamEvalBlocks(rows(), 2, block, rank, world_size)) for rank in range(world_size)]
    assert len({len(blocks) for blocks in ranks}) == 1, "every rank has the same number of blocks"
    given = sorted(number for blocks in ranks for part in blocks for number in answers(part))
    assert given == [number for number in range(NUM_ROWS) for _ in range(2)]


def check(folder: Path, train: Any, evaluation: Any = None, **changes: Any) -> None:
    args = make_args(folder / "out", gradient_accumulation_steps=1, **changes)
    check_run(
        args,
        Collectives(args.device),
        Given(
            model=str(folder),
            tokenizer=None,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=train,
            eval_dataset=evaluation,
        ),
    )


@pytest.mark.parametrize("known_columns", [True, False])
def test_preflight_takes_streams_and_says_what_they_lack(
    tmp_path: Path, known_columns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path)
    stream = rows(known_columns=known_columns)
    check(tmp_path, stream, datasets.IterableDatasetDict({"a": stream, "b": stream}))
    check(tmp_path, stream, datasets.DatasetDict({"a": datasets.Dataset.from_dict({"prompt": ["x"]})}))
    with pytest.raises(ConfigError, match="set max_steps"):
        check(tmp_path, stream, max_steps=-1)
    with pytest.raises(ConfigError, match=r"dynamic_sampling=True .* stream"):
        check(tmp_path, stream, dynamic_sampling=True)
    with pytest.raises(DataError, match=r"train_dataset has no column 'prompt'; its columns are .*question"):
        check(tmp_path, stream.rename_column("prompt", "question"))
    with pytest.raises(DataError, match=r"eval_dataset\['a'\] has no column 'prompt'"):
        check(tmp_path, stream, {"a": stream.rename_column("prompt", "question")})
    with pytest.raises(DataError, match=r"column\(s\) completions"):
        check(tmp_path, stream.rename_column("answer", "completions"))
    with pytest.raises(TypeError, match=r"must be a datasets\.Dataset or IterableDataset, got list"):
        check(tmp_path, [{"prompt": "x"}])
    check(tmp_path, stream, dataloader_num_workers=2)
    assert "a stream is read in the rank itself" in caplog.text


def test_the_first_prompts_of_a_stream_are_checked(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    long = rows().map(lambda row: {"prompt": row["prompt"] * (80 if row["answer"] == 5 else 1)})
    with pytest.raises(DataError, match="train_dataset, row 5: the prompt has 160 tokens"):
        check(tmp_path, long)
