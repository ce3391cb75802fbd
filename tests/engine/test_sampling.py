"""Who samples which batch: our function plain ones, vLLM's sampler all others; with a sampler of vLLM's form."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams  # noqa: TID251

from colocate_rl.engine import known, sampling
from colocate_rl.engine.vllm_api import sampling_parameters
from colocate_rl.errors import EngineError
from tests.sampling import kernel_cases

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]

CPU = torch.device("cpu")


def torch_draw(
    logits: torch.Tensor,
    places: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels do, row by row."""
    scaled = logits.double() / temperatures[places.long()].double()[:, None]
    logprobs = scaled.log_softmax(-1)
    sums = logprobs.exp().cumsum(-1)
    mixed = (seeds[places.long()].numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) ^ (
        positions[rows].numpy().astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)
    )
    shares = [np.random.default_rng(int(number)).random() for number in mixed]
    drawn = torch.tensor(np.array(shares))[:, None] * sums[:, -1:]
    tokens = torch.searchsorted(sums, drawn, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0].float()


@pytest.mark.parametrize("case", kernel_cases(rows=1_000)[1:], ids=str)
def test_the_draw_of_these_tests_passes_what_the_kernels_must(case: Any) -> None:
    case.check(torch_draw, CPU)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton comes with torch for GPUs only")
def test_the_kernels_in_tritons_interpreter() -> None:
    code = (
        "import torch; from colocate_rl.engine.kernels import draw; from tests.sampling import kernel_cases\n"
        "for case in kernel_cases(rows=100): case.check(draw, torch.device('cpu'))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1"},  # read when triton is imported
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert found.returncode == 0, found.stderr


def test_the_check_at_start_finds_wrong_draws() -> None:
    sampling.check(torch_draw, CPU)

    def without_temperature(logits: Any, places: Any, temperatures: Any, *others: Any) -> Any:
        return torch_draw(logits, places, torch.ones_like(temperatures), *others)

    def likeliest(logits: Any, places: Any, temperatures: Any, *others: Any) -> Any:
        tokens = logits.argmax(-1)
        scaled = logits.double() / temperatures[places.long()].double()[:, None]
        return tokens, scaled.log_softmax(-1).gather(1, tokens[:, None])[:, 0].float()

    def one_seed(logits: Any, places: Any, temperatures: Any, seeds: Any, positions: Any, rows: Any) -> Any:
        return torch_draw(logits, places, temperatures, seeds[:1].expand_as(seeds), 0 * positions, rows)

    def next_token(*arguments: Any) -> Any:
        tokens, logprobs = torch_draw(*arguments)
        return tokens + 1, logprobs

    def nothing(*arguments: Any) -> Any:
        tokens, logprobs = torch_draw(*arguments)
        return tokens, torch.full_like(logprobs, torch.nan)

    for wrong in (without_temperature, likeliest, one_seed, next_token, nothing):
        with pytest.raises(EngineError, match="sampling kernels"):
            sampling.check(wrong, CPU)


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ({}, True),
        ({"temperature": 0.7, "seed": 3, "n": 4, "max_tokens": 9, "stop_token_ids": [1], "ignore_eos": True}, True),
        ({"top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}, True),
        ({"temperature": 0.0}, False),
        ({"top_k": 5}, False),
        ({"top_p": 0.9}, False),
        ({"min_p": 0.1}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"logprobs": 2}, False),
        ({"logprobs": None}, False),
        ({"min_tokens": 2}, False),
        ({"logit_bias": {3: 1.0}}, False),
        ({"allowed_token_ids": [1, 2]}, False),
        ({"bad_words": ["no"]}, False),
        ({"structured_outputs": {"regex": "a+"}}, False),
        ({"extra_args": {"a": 1}}, False),
    ],
)
def test_what_a_plain_request_is(changes: dict[str, Any], plain: bool) -> None:
    assert sampling.is_plain(sampling_parameters(**changes)) == plain


def test_the_sampler_of_this_vllm_was_read() -> None:
    from vllm.v1.worker.gpu.sample.sampler import Sampler  # noqa: TID251

    assert known.is_read_sampler(Sampler)
    names = Sampler.__call__.__globals__
    assert "get_num_sampled_and_rejected" in names
    tensors = sampling._logprobs_type(names)(torch.ones(2, 1), torch.zeros(2, 1), torch.zeros(2))
    made = names["SamplerOutput"](
        sampled_token_ids=torch.ones(2, 1), logprobs_tensors=tensors, num_nans=None, num_sampled=1, num_rejected=0
    )
    assert made.logprobs_tensors.tolists().logprobs.tolist() == [[0.0], [0.0]]


@pytest.mark.skipif("watermarking" not in SamplingParams.__struct_fields__, reason="a field of newer versions")
def test_that_nothing_is_watermarked_is_plain() -> None:
    assert sampling.is_plain(sampling_parameters(watermarking=False))


# What a sampler of vLLM's form is made of here; the names are those that its method sees.
@dataclass
class LogprobsTensors:
    logprob_token_ids: Any
    logprobs: Any
    selected_token_ranks: Any


@dataclass
class SamplerOutput:
    sampled_token_ids: Any
    logprobs_tensors: Any
    num_nans: Any
    num_sampled: Any
    num_rejected: Any


def compute_topk_logprobs() -> type[LogprobsTensors]:
    return LogprobsTensors


def get_num_sampled_and_rejected(
    ones: torch.Tensor, lengths: torch.Tensor, _: Any, places: torch.Tensor, prefill: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.where(lengths < prefill[places.long()], 0, ones), torch.zeros_like(ones)


class Sampler:
    """Of vLLM's form: it answers -1 for each row."""

    logprobs_mode = "processed_logprobs"
    compute_nans = False

    def __init__(self, requests: int) -> None:
        self.sampling_states = SimpleNamespace(
            max_num_reqs=requests,
            temperature=SimpleNamespace(gpu=torch.full((requests,), 0.7)),
            seeds=SimpleNamespace(gpu=torch.arange(requests)),
        )
        self.req_states = SimpleNamespace(prefill_len=SimpleNamespace(gpu=torch.full((requests,), 4)))
        self.added: list[int] = []

    def add_request(self, place: int, *_: Any) -> str:
        self.added.append(place)
        return "vllm"

    def __call__(self, logits: torch.Tensor, batch: Any) -> Any:
        return [-1] * len(batch.idx_mapping_np)


def runner_with(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    monkeypatch.setattr(known, "SAMPLERS", known._digest(Sampler))
    sampler = Sampler(8)
    vars(sampler).update(changes)
    return SimpleNamespace(sampler=sampler, device=CPU, model_config=SimpleNamespace(logits_processors=None))


def batch_of(places: list[int], rows: int | None = None) -> tuple[torch.Tensor, Any]:
    logits = torch.randn(rows or len(places), 50, generator=torch.Generator().manual_seed(0))
    return logits, SimpleNamespace(
        idx_mapping_np=np.array(places),
        idx_mapping=torch.tensor(places, dtype=torch.int32),
        positions=torch.arange(20, 40),
        logits_indices=torch.arange(len(places)) * 2,
        seq_lens=torch.tensor([3 if place == 5 else 9 for place in places]),
        cu_num_logits=None,
        num_reqs=len(places),
    )


def test_a_batch_of_plain_requests_is_sampled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_with(monkeypatch)
    assert sampling.obstacle(runner) is None
    sampling.stand_in(runner.sampler, torch_draw, CPU)
    plain = sampling_parameters(temperature=0.7)
    assert runner.sampler.add_request(2, 4, plain) == "vllm"  # 0.24 to 0.30
    runner.sampler.add_request(5, plain)
    runner.sampler.add_request(6, sampling_parameters(top_k=3))
    assert runner.sampler.added == [2, 5, 6]
    logits, batch = batch_of([5, 2])
    found = runner.sampler(logits, batch)
    tokens, logprobs = torch_draw(
        logits,
        batch.idx_mapping,
        torch.full((8,), 0.7),
        torch.arange(8),
        batch.positions,
        batch.logits_indices,
    )
    assert torch.equal(found.sampled_token_ids, tokens[:, None])
    assert torch.equal(found.logprobs_tensors.logprob_token_ids, tokens[:, None])
    assert torch.equal(found.logprobs_tensors.logprobs, logprobs[:, None])
    assert found.logprobs_tensors.selected_token_ranks.tolist() == [0, 0]
    assert found.num_sampled.tolist() == [0, 1]  # the first one's prompt is not computed to its end
    assert runner.sampler(*batch_of([2, 6])) == [-1, -1]
    assert runner.sampler(*batch_of([2], rows=2)) == [-1]  # several tokens of a request
    with sampling.vllms_sampler(runner):
        assert runner.sampler(*batch_of([5, 2])) == [-1, -1]
    assert torch.equal(runner.sampler(*batch_of([5, 2])).sampled_token_ids, tokens[:, None])
    runner.sampler.add_request(2, 4, sampling_parameters(temperature=0.0))  # its place is given to another request
    assert runner.sampler(*batch_of([5, 2])) == [-1, -1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compute_nans": True}, "uses compute_nans"),
        ({"trace_replay_state": object()}, "uses trace_replay_state"),
        ({"return_sampling_mask": True}, "uses return_sampling_mask"),
        ({"logits_processors": [np.random.default_rng()]}, "logits processors are set"),
        ({"logprobs_mode": "raw_logprobs"}, "raw_logprobs"),
    ],
)
def test_a_special_sampler_is_left_alone(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str) -> None:
    runner = runner_with(monkeypatch, **changes)
    obstacle = sampling.obstacle(runner)
    assert obstacle is not None
    assert words in obstacle
    sampling.take_over(core_with(runner))
    assert type(runner.sampler) is Sampler


def test_other_samplers_and_processors_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_with(monkeypatch)
    runner.model_config.logits_processors = ["mine"]
    assert sampling.obstacle(runner) == "logits processors are set"

    class Watermarks(Sampler):
        pass

    runner = runner_with(monkeypatch)
    runner.sampler = Watermarks(8)
    found = sampling.obstacle(runner)
    assert found is not None
    assert "Watermarks" in found
    assert sampling.obstacle(SimpleNamespace()) is not None
    assert sampling.obstacle(None) is not None
    with sampling.vllms_sampler(runner):
        assert type(runner.sampler) is Watermarks


def core_with(runner: Any) -> Any:
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    return SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))


def test_the_runner_of_a_core_of_another_form_is_none() -> None:
    assert sampling.runner_of(SimpleNamespace(model_executor=SimpleNamespace())) is None
    runner = object()
    assert sampling.runner_of(core_with(runner)) is runner


def kernels_with(monkeypatch: pytest.MonkeyPatch, draw: Any) -> None:
    kernels: Any = ModuleType("colocate_rl.engine.kernels")
    kernels.draw = draw
    monkeypatch.setitem(sys.modules, "colocate_rl.engine.kernels", kernels)


def test_kernels_that_pass_their_check_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_with(monkeypatch, torch_draw)
    runner = runner_with(monkeypatch)
    sampling.take_over(core_with(runner))
    assert runner.sampler.own_draw is torch_draw


def test_kernels_that_fail_it_cost_speed_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels_with(monkeypatch, lambda logits, *_: (logits.argmax(-1), torch.zeros(len(logits))))
    runner = runner_with(monkeypatch)
    sampling.take_over(core_with(runner))
    assert type(runner.sampler) is Sampler
    assert "slower: ours failed its check" in caplog.text


def test_a_runner_of_another_form_costs_speed_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels_with(monkeypatch, torch_draw)
    for lacking, name in ((lambda runner: runner, "model_config"), (lambda runner: runner.sampler, "sampling_states")):
        runner = runner_with(monkeypatch)
        delattr(lacking(runner), name)
        caplog.clear()
        sampling.take_over(core_with(runner))
        assert type(runner.sampler) is Sampler
        assert "slower: ours failed its check" in caplog.text
