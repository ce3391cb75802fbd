"""Completions that call tools, over several ranks: as one process would go on with each row alone."""

import functools
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from colocate_rl.collectives import Collectives
from colocate_rl.engine.protocol import Completion, Request, SamplingSpec
from colocate_rl.metrics import MetricBuffer, PhaseClock
from colocate_rl.placement import Placement
from colocate_rl.rollout.collect import Rollout, RolloutSettings
from colocate_rl.rollout.dialogue import ToolFormat
from colocate_rl.rollout.generate import Generator, request_seed
from colocate_rl.rollout.prompts import PromptCodec
from colocate_rl.rollout.records import EngineStats, RolloutBatch
from colocate_rl.rollout.rewards import Rewards
from colocate_rl.rollout.sampler import PROMPT_INDEX
from colocate_rl.rollout.tools import ToolBox
from colocate_rl.rollout.turns import COPY_BITS, ToolLoop
from tests.ranks.launch import Ranks, outcome
from tests.tiny import chat_tokenizer as new_tokenizer

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]

SEED = 5
EOS, PAD = 256, 257
GROUP = 3
WANTS = (0, 2, 1, 3, 0)
"""How many rounds of tools the copies of each prompt want at least."""
ROWS = [
    {PROMPT_INDEX: 10 + number, "prompt": [{"role": "user", "content": f"want {wanted}"}]}
    for number, wanted in enumerate(WANTS)
    for _ in range(GROUP)
]
SPLITS = {
    "one rank": ((15,), 1),
    "even, one engine": ((5, 5, 5), 1),
    "even, two engines": ((5, 5, 5), 2),
    "a group on all ranks": ((4, 1, 10), 3),
    "two empty": ((0, 15, 0), 2),
}

Row = dict[str, Any]

chat_tokenizer = functools.cache(new_tokenizer)


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one.
        b: two.
    """
    if a == 1:
        raise ValueError("one is too few")
    return a + b


@dataclass
class Talker:
    """Calls the tool as often as the prompt and the copy's seed want; says its seed at the end."""

    max_lengths: list[int]

    def generate(self, requests: Sequence[Request], sampling: SamplingSpec) -> list[list[Completion]]:
        self.max_lengths.append(sampling.max_tokens)
        answers = []
        for request in requests:
            assert request.seed is not None
            text = chat_tokenizer().decode(list(request.token_ids))
            seeds = [request.seed + copy for copy in range(request.num_completions)]
            answers.append([talk(text, seed, sampling.max_tokens) for seed in seeds])
        return answers

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None: ...

    def reseed(self, seed: int) -> None: ...

    def close(self) -> None: ...


def talk(text: str, seed: int, limit: int) -> Completion:
    """The next turn: a pure function of what has been said and the seed."""
    calls = re.findall(r'"a": (\d), "b": (\d)', text)
    found = re.search(r"want (\d)", text)
    assert found
    wanted = int(calls[0][1]) if calls else int(found.group(1)) + seed % 2
    if len(calls) < wanted:
        said = f'<tool_call>{{"name": "add", "arguments": {{"a": {len(calls)}, "b": {wanted}}}}}</tool_call>'
    else:
        said = f"done {seed % 1000}"
    ids = [*chat_tokenizer()(said)["input_ids"], EOS]
    logprobs = [-(token + 1) / 64 for token in ids]
    return Completion(ids[:limit], logprobs[:limit], "stop" if len(ids) <= limit else "length")


def seen_reward(completions: list[list[dict[str, Any]]], **_: Any) -> list[float]:
    return [float(sum(message["role"] == "tool" for message in messages)) for messages in completions]


@dataclass(frozen=True)
class Result:
    completions: list[Completion]
    texts: list[list[dict[str, Any]]]
    rewards: torch.Tensor
    batch: RolloutBatch
    stats: list[EngineStats]
    figures: dict[str, float | None]
    max_lengths: list[int]


def collect(
    parts: Sequence[Sequence[Row]], num_engines: int, limit: int, window: int | None, most: int | None
) -> Result:
    collectives = Collectives(torch.device("cpu"))
    placement = Placement.on_cpu(num_ranks=collectives.world_size, num_engines=num_engines, num_cores=8)
    talker = Talker([])
    generator = Generator(placement, talker if placement.shard_of(collectives.rank) else None, collectives)
    toolbox = ToolBox([add])
    codec = PromptCodec(chat_tokenizer(), None, toolbox.schemas)
    sampling = SamplingSpec(limit, stop_token_ids=(EOS,))
    loop = ToolLoop(
        codec,
        toolbox,
        ToolFormat(codec.tokenizer, toolbox.schemas, (EOS,)),
        generator,
        collectives,
        sampling,
        window=window,
        max_iterations=most,
    )
    rollout = Rollout(
        codec,
        generator,
        Rewards([seen_reward]),
        collectives,
        RolloutSettings(sampling, PAD, deal_rows=True),  # which dialogues are not
        PhaseClock(lambda: None),
        further=loop,
    )
    metrics = MetricBuffer()
    rows = parts[collectives.rank]
    rated = rollout.sample(rows, metrics, trainer_state=None, seed=SEED, policy_version=7)
    scored, batch = rollout.finish(rated, metrics, to_train=True)
    stats = rated.answered.stats
    figures = metrics.flush(collectives)
    return Result(scored.completions, scored.texts, scored.rewards, batch, stats, figures, talker.max_lengths)


@dataclass
class Alone:
    """What comes of one row, by itself."""

    ids: list[int]
    sampled: list[bool]
    messages: list[dict[str, Any]]
    reason: str
    calls: int
    failures: int


def alone(row: Row, copy: int, limit: int, window: int | None, most: int | None) -> Alone:
    tokenizer = chat_tokenizer()
    prompt = f"tools:add;<|eos|>\nuser:{row['prompt'][0]['content']}<|eos|>\nassistant:"
    num_prompt = len(tokenizer(prompt)["input_ids"])
    room = limit if window is None else min(limit, window - num_prompt)
    text, seed = "", request_seed(SEED, row[PROMPT_INDEX]) + copy
    result = Alone([], [], [], "", 0, 0)
    for turn in itertools.count():
        said = talk(prompt + text, seed, room - len(result.ids))
        result.ids += said.token_ids
        result.sampled += [True] * len(said.token_ids)
        result.reason = said.finish_reason
        spoken = tokenizer.decode(list(said.token_ids)).removesuffix("<|eos|>")
        call = re.fullmatch(r"<tool_call>(.*)</tool_call>", spoken)
        message: dict[str, Any] = {"role": "assistant", "content": "" if call else spoken}
        if call:
            message["tool_calls"] = [{"type": "function", "function": json.loads(call.group(1))}]
        result.messages.append(message)
        if not call or said.finish_reason != "stop" or turn == most:
            return result
        arguments = json.loads(call.group(1))["arguments"]
        result.calls += 1
        result.failures += arguments["a"] == 1
        content = str({"error": "one is too few"}) if arguments["a"] == 1 else str(arguments["a"] + arguments["b"])
        suffix = f"\ntool:{content}<|eos|>\nassistant:"
        ids = tokenizer(suffix)["input_ids"]
        if len(result.ids) + len(ids) >= room:
            return result
        result.ids += ids
        result.sampled += [False] * len(ids)
        result.messages.append({"role": "tool", "name": "add", "content": content})
        text = tokenizer.decode(result.ids)
        index = row[PROMPT_INDEX] << COPY_BITS | copy
        seed = request_seed(zlib.crc32(f"{SEED}/turn {turn}".encode()), index)


def cut(sizes: Sequence[int]) -> list[list[Row]]:
    starts = itertools.accumulate(sizes, initial=0)
    return [ROWS[start : start + size] for start, size in zip(starts, sizes, strict=False)]


@pytest.mark.parametrize(("sizes", "num_engines"), SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize(
    ("limit", "window", "most"),
    [(400, None, None), (400, None, 1), (130, None, None), (95, None, None), (400, 170, None)],
    ids=["free", "one round", "tight", "too tight for tools", "small window"],
)
def test_every_row_goes_on_as_it_would_alone(
    ranks: Callable[[int], Ranks],
    sizes: tuple[int, ...],
    num_engines: int,
    limit: int,
    window: int | None,
    most: int | None,
) -> None:
    results: list[Result] = ranks(len(sizes)).run(collect, cut(sizes), num_engines, limit, window, most)
    wanted = [alone(row, number % GROUP, limit, window, most) for number, row in enumerate(ROWS)]
    completions = [completion for result in results for completion in result.completions]
    assert [list(c.token_ids) for c in completions] == [w.ids for w in wanted]
    assert [c.sampled or [True] * len(c.token_ids) for c in completions] == [w.sampled for w in wanted]
    assert [c.finish_reason for c in completions] == [w.reason for w in wanted]
    assert {c.policy_version for c in completions} == {7}
    assert [text for result in results for text in result.texts] == [w.messages for w in wanted]
    assert max(len(c.token_ids) for c in completions) <= limit
    calls, failures = sum(w.calls for w in wanted), sum(w.failures for w in wanted)
    for result in results:
        assert result.figures["tools/call_frequency"] == pytest.approx(calls / len(ROWS))
        assert result.figures["tools/failure_frequency"] == pytest.approx(failures / calls)
        assert result.figures["completions/mean_length"] == pytest.approx(
            sum(sum(w.sampled) for w in wanted) / len(ROWS)
        )
        assert sum(stat.num_prompts for stat in result.stats) >= len(WANTS) + sum(
            sum(message["role"] == "tool" for message in w.messages) for w in wanted
        )
    if (limit, window, most) == (400, None, None):
        assert max(w.calls for w in wanted) == 4, "the script should hold several rounds"
        assert failures > 0


def test_what_tools_wrote_is_never_learned_from(ranks: Callable[[int], Ranks]) -> None:
    results: list[Result] = ranks(2).run(collect, cut((7, 8)), 2, 400, None, None)
    silent = 0
    for result in results:
        batch = result.batch
        assert torch.equal(batch.loss_mask, batch.completion_mask)
        for row, completion in enumerate(result.completions):
            length = len(completion.token_ids)
            start = int(batch.attention_mask[row].sum()) - length
            mask = batch.completion_mask[row, start : start + length].tolist()
            assert mask == (list(completion.sampled) if completion.sampled else [True] * length)
            assert int(batch.completion_mask[row].sum()) == completion.num_sampled
            assert batch.input_ids[row, start : start + length].tolist() == list(completion.token_ids)
            values = batch.sampling_logprobs[row]
            ids = batch.input_ids[row][batch.completion_mask[row]]
            assert values[batch.completion_mask[row]].tolist() == [-(token + 1) / 64 for token in ids.tolist()]
            assert values[~batch.completion_mask[row]].abs().sum() == 0
            silent += length - completion.num_sampled
    assert silent > 100
    rewards = [reward for result in results for reward in result.rewards[:, 0].tolist()]
    texts = [text for result in results for text in result.texts]
    assert rewards == [float(len(text) // 2) for text in texts]


def test_engines_are_asked_for_no_more_than_the_longest_room(ranks: Callable[[int], Ranks]) -> None:
    (result,) = ranks(1).run(collect, [ROWS], 1, 150, None, None)
    assert result.max_lengths[0] == 150
    assert all(later < earlier for earlier, later in itertools.pairwise(result.max_lengths))


class Broken(ToolBox):
    """Fails itself, not one of its tools."""

    def call(self, calls: Any) -> Any:
        raise RuntimeError("told to fail")


def collect_failing(parts: Sequence[Sequence[Row]]) -> Any:
    rank = Collectives(torch.device("cpu")).rank
    if rank == 1:
        ToolBox.call = Broken.call  # type: ignore[method-assign]
    return outcome(collect, parts, 1, 400, None, None)


def test_a_failure_on_one_rank_ends_all(ranks: Callable[[int], Ranks], tmp_path_factory: Any) -> None:
    own = Ranks(2, tmp_path_factory.mktemp("failing"))  # their ToolBox is spoiled
    try:
        results = own.run(collect_failing, cut((7, 8)))
    finally:
        own.kill()
    assert [raised.kind for raised in results] == ["PeerError", "RuntimeError"]
    assert "rank 1 failed while calling tools" in results[0].message
