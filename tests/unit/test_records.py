"""The padded batch: right padding, masks from lengths alone (F4), engine ids bit for bit, cutting and splitting."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colocate_rl.engine.protocol import Completion
from colocate_rl.rollout.records import RolloutBatch

pytestmark = pytest.mark.unit

PAD = 257


def completion(*token_ids: int, logprob: float = -0.5) -> Completion:
    values = [logprob - position for position in range(len(token_ids))]
    return Completion(list(token_ids), values, "stop")


def small_batch(**changes: Any) -> RolloutBatch:
    """Three rows: prompts of 1, 3 and 2 tokens, completions of 2, 0 and 1."""
    values: dict[str, Any] = {
        "prompts": [[5], [6, 7, 8], [9, 10]],
        "completions": [completion(11, 12), completion(), completion(13)],
        "advantages": torch.tensor([1.0, -1.0, 0.5]),
        "keep": [True, True, False],
        "pad_token_id": PAD,
    }
    return RolloutBatch.from_rows(**{**values, **changes})


def test_rows_by_hand() -> None:
    batch = small_batch()
    assert batch.input_ids.tolist() == [[5, 11, 12], [6, 7, 8], [9, 10, 13]]
    assert batch.attention_mask.all()
    f, t = False, True
    assert batch.completion_mask.tolist() == [[f, t, t], [f, f, f], [f, f, t]]
    assert batch.loss_mask.tolist() == [[f, t, t], [f, f, f], [f, f, f]]
    assert batch.sampling_logprobs.tolist() == [[0.0, -0.5, -1.5], [0.0] * 3, [0.0, 0.0, -0.5]]
    assert batch.advantages.tolist() == [1.0, -1.0, 0.5]
    assert batch.old_logprobs is None
    assert batch.ref_logprobs is None
    assert batch.num_rows == 3


def test_what_tools_wrote_is_in_the_row_but_in_no_mask() -> None:
    dialogue = Completion([11, 12, 13, 14], [-0.5, 0.0, 0.0, -1.5], "stop", sampled=[True, False, False, True])
    batch = small_batch(completions=[dialogue, completion(), completion(13)])
    assert batch.input_ids[0].tolist() == [5, 11, 12, 13, 14]
    assert batch.attention_mask[0].all()
    f, t = False, True
    assert batch.completion_mask.tolist() == [[f, t, f, f, t], [f] * 5, [f, f, t, f, f]]
    assert batch.loss_mask.tolist() == [[f, t, f, f, t], [f] * 5, [f] * 5]
    assert (dialogue.num_sampled, completion(7, 8, 9).num_sampled) == (2, 3)


def test_padding_stands_on_the_right() -> None:
    batch = small_batch(prompts=[[5], [6, 7, 8, 20], [9]])
    assert batch.input_ids.tolist() == [[5, 11, 12, PAD], [6, 7, 8, 20], [9, 13, PAD, PAD]]
    assert batch.attention_mask.sum(1).tolist() == [3, 4, 2]


@pytest.mark.parametrize(
    "sampled",
    [(11, 256), (11, 12), (256,), (11, 256, 12, 256), (PAD, PAD), (256, PAD)],
    ids=["ends with eos", "cut by length", "eos only", "eos inside", "pads only", "eos then pad"],
)
@pytest.mark.parametrize("pad", [PAD, 256])
def test_masks_come_from_lengths_and_never_from_ids(sampled: tuple[int, ...], pad: int) -> None:
    batch = RolloutBatch.from_rows(
        [[pad, 5], [1]],
        [completion(*sampled), completion(*[7] * 6)],
        torch.zeros(2),
        keep=[True, True],
        pad_token_id=pad,
    )
    length = len(sampled)
    assert batch.completion_mask[0].tolist() == [False] * 2 + [True] * length + [False] * (5 - length)
    assert batch.attention_mask[0].sum() == 2 + length
    assert batch.input_ids[0, 2 : 2 + length].tolist() == list(sampled)


lengths = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=6)


def batch_of(shape: list[tuple[int, int]]) -> RolloutBatch:
    """Rows of distinct ids, so that any mix-up shows."""
    number = iter(range(1000, 100_000))
    prompts = [[next(number) for _ in range(prompt)] for prompt, _ in shape]
    completions = [completion(*[next(number) for _ in range(sampled)]) for _, sampled in shape]
    batch = RolloutBatch.from_rows(
        prompts,
        completions,
        torch.arange(len(shape)),
        keep=[row % 3 != 2 for row in range(len(shape))],
        pad_token_id=PAD,
    )
    marks = torch.arange(batch.input_ids.numel(), dtype=torch.float32).view(batch.input_ids.shape)
    return batch.with_logprobs(old_logprobs=marks, ref_logprobs=-marks)


@given(shape=lengths)
def test_every_id_stands_where_its_mask_says(shape: list[tuple[int, int]]) -> None:
    batch = batch_of(shape)
    assert batch.input_ids.shape[1] == max(prompt + sampled for prompt, sampled in shape)
    number = iter(range(1000, 100_000))
    is_prompt = batch.attention_mask & ~batch.completion_mask
    for mask in (is_prompt, batch.completion_mask):
        for row in range(len(shape)):
            for token in batch.input_ids[row][mask[row]].tolist():
                assert token == next(number)
    assert is_prompt.sum(1).tolist() == [prompt for prompt, _ in shape]
    assert batch.completion_mask.sum(1).tolist() == [sampled for _, sampled in shape]
    assert bool((batch.input_ids[~batch.attention_mask] == PAD).all())
    assert bool((batch.loss_mask <= batch.completion_mask).all())
    assert batch.sampling_logprobs[~batch.completion_mask].abs().sum() == 0


@given(shape=lengths, data=st.data())
def test_chosen_rows_keep_all_their_facts(shape: list[tuple[int, int]], data: st.DataObject) -> None:
    batch = batch_of(shape)
    chosen = data.draw(st.lists(st.integers(0, len(shape) - 1), max_size=8))
    part = batch.rows(chosen)
    width = max((sum(shape[row]) for row in chosen), default=0)
    assert part.input_ids.shape == (len(chosen), width), "cut to the longest chosen row"
    for item in dataclasses.fields(RolloutBatch):
        before, after = getattr(batch, item.name), getattr(part, item.name)
        for position, row in enumerate(chosen):
            expected = before[row] if before.ndim == 1 else before[row, :width]
            assert torch.equal(after[position], expected), item.name
        assert after.is_contiguous()


def test_no_rows() -> None:
    batch = RolloutBatch.from_rows([], [], torch.zeros(0), keep=[], pad_token_id=PAD)
    assert batch.input_ids.shape == (0, 0)
    assert batch.num_rows == 0
    assert batch.rows([]).num_rows == 0


def test_split_gives_equal_consecutive_parts() -> None:
    batch = batch_of([(1, 1), (2, 4), (1, 2), (1, 0)])
    first, second = batch.split(2)
    assert first.advantages.tolist() == [0, 1]
    assert second.advantages.tolist() == [2, 3]
    assert (first.input_ids.shape, second.input_ids.shape) == ((2, 6), (2, 3))
    with pytest.raises(AssertionError):
        batch.split(3)


def test_with_logprobs_fills_one_and_leaves_the_other() -> None:
    batch = small_batch()
    old, ref = torch.ones(3, 3), torch.zeros(3, 3)
    filled = batch.with_logprobs(old_logprobs=old)
    assert filled.old_logprobs is old
    assert filled.ref_logprobs is None
    both = filled.with_logprobs(ref_logprobs=ref)
    assert both.old_logprobs is old
    assert both.ref_logprobs is ref
    assert both.with_logprobs().old_logprobs is old
    assert batch.old_logprobs is None, "the original is left alone"


def test_to_moves_every_tensor() -> None:
    batch = batch_of([(1, 2), (2, 1)])
    moved = batch.to(torch.device("meta"))
    for item in dataclasses.fields(RolloutBatch):
        assert getattr(moved, item.name).device.type == "meta", item.name
    assert small_batch().to(torch.device("meta")).old_logprobs is None


def test_shapes_that_disagree_are_a_bug() -> None:
    batch = small_batch()
    with pytest.raises(AssertionError, match="old_logprobs"):
        batch.with_logprobs(old_logprobs=torch.zeros(3, 2))
    with pytest.raises(AssertionError, match="advantages"):
        dataclasses.replace(batch, advantages=torch.zeros(2))
    with pytest.raises(AssertionError):
        dataclasses.replace(batch, loss_mask=batch.loss_mask.long())


def test_ids_and_log_probabilities_of_different_lengths_are_refused() -> None:
    with pytest.raises(RuntimeError):
        small_batch(completions=[Completion([1, 2, 3], [0.5, 1], "stop"), completion(), completion(3)])
    with pytest.raises(ValueError, match="zip"):
        small_batch(completions=[completion(1)])
