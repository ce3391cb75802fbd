"""Compiled layers and head against the same model run as it is, on CPU; and when a model stays as it is."""

import contextlib
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from colocate_rl import GRPOConfig, speedups
from colocate_rl.collectives import Collectives
from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.training import adapters, compiling, head
from colocate_rl.training.losses import LossSettings
from colocate_rl.training.objective import Objective
from tests.lora import lora_policy, move
from tests.tiny import tiny_model
from tests.unit.test_packing import RAGGED, assert_same_gradients, gradients, make_batch, make_model

pytestmark = [pytest.mark.unit, pytest.mark.timeout(300)]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler")


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def objective(**changes: Any) -> Objective:
    return Objective(LossSettings(), 0.8, 16, contextlib.nullcontext, **changes)


@needs_compiler
@pytest.mark.parametrize(("packed", "checkpointing"), [(False, False), (True, False), (True, True)])
def test_values_and_gradients_are_the_same(packed: bool, checkpointing: bool) -> None:
    model = make_model()
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batches = [make_batch(*RAGGED), make_batch((5, 9), (3, 3), (4, 11)), make_batch((2, 17), (1, 30))]
    plain = [objective(packed=packed).statistics(model, model, batch) for batch in batches]
    expected = [(found.logprobs.detach(), found.entropy.detach(), gradients(model, found)) for found in plain]
    compiling.install(model)
    for batch, (logprobs, entropy, gradient) in zip(batches, expected, strict=True):
        found = objective(packed=packed, compiled=True).statistics(model, model, batch)
        torch.testing.assert_close(found.logprobs, logprobs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.entropy, entropy, rtol=1e-5, atol=1e-5)
        for name, value in gradients(model, found).items():
            torch.testing.assert_close(value, gradient[name], rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("frozen_copy", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_compiled_layers_notice_when_the_adapter_becomes_the_reference(packed: bool, frozen_copy: bool) -> None:
    policy = lora_policy(make_model())
    if frozen_copy:
        adapters.add_reference(policy)
        move(policy, 2)
    model = adapters.causal_lm(policy)
    batches = [make_batch(*RAGGED), make_batch((5, 9), (3, 3), (4, 11))]
    plain, fast = objective(packed=packed), objective(packed=packed, compiled=True)

    def both_ways(way: Objective, batch: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        with adapters.reference_weights(policy):
            under_reference = way.logprobs(model, batch)
        return under_reference, way.logprobs(model, batch), gradients(model, way.statistics(model, model, batch))

    expected = [both_ways(plain, batch) for batch in batches]
    assert all(float((off - on).abs().max()) > 0.01 for off, on, _ in expected), "the adapter does something"
    compiling.install(model)
    for _ in range(2):  # the second time nothing is compiled anew
        for batch, (off, on, gradient) in zip(batches, expected, strict=True):
            found_off, found_on, found_gradient = both_ways(fast, batch)
            torch.testing.assert_close(found_off, off, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found_on, on, rtol=1e-5, atol=1e-5)
            assert_same_gradients(found_gradient, gradient)


class Counted(nn.Module):
    """A layer that knows whether it runs as Python."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.python_calls = 0

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.python_calls += 1
        return states * self.weight


def test_only_who_asks_runs_compiled() -> None:
    layer = Counted()
    layer.compile(backend="eager", dynamic=True)
    with compiling.chosen(False):
        layer(torch.ones(3))
    assert layer.python_calls == 1
    with compiling.chosen(True):
        layer(torch.ones(3))
    assert layer.python_calls == 1


def test_the_layers_of_a_model() -> None:
    model = tiny_model()
    assert compiling.layers_of(model) == list(model.model.layers)
    compiling.install(model)
    assert all(layer._compiled_call_impl is not None for layer in model.model.layers)
    compiling.uninstall(model)
    assert all(layer._compiled_call_impl is None for layer in model.model.layers)


def decide(folder: Path, model: Any, **changes: Any) -> Objective:
    args = GRPOConfig(str(folder), use_cpu=True, **changes)
    return speedups.decide_compiling(args, [model], objective(), Collectives(args.device))


def test_the_choice_on_a_cpu(tmp_path: Path) -> None:
    model = tiny_model()
    assert not decide(tmp_path, model).compiled
    assert not decide(tmp_path, model, compile_layers=False).compiled
    assert model.model.layers[0]._compiled_call_impl is None


@needs_compiler
def test_a_model_that_passes_the_check_is_compiled(tmp_path: Path) -> None:
    model = tiny_model()
    assert decide(tmp_path, model, compile_layers=True).compiled
    assert all(layer._compiled_call_impl is not None for layer in model.model.layers)


@needs_compiler
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_with_an_adapter_the_reference_is_proven_too(
    tmp_path: Path, beta: float, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = lora_policy()
    layer: Any = adapters.causal_lm(policy).get_submodule("model.layers.0.self_attn.q_proj")
    args = GRPOConfig(str(tmp_path), use_cpu=True, compile_layers=True, beta=beta)
    collectives = Collectives(args.device)
    assert speedups.decide(args, policy, None, objective(), collectives).compiled
    run = Objective.statistics

    def wrong_without_adapter(way: Objective, *given: Any, **named: Any) -> Any:
        found = run(way, *given, **named)
        return replace(found, logprobs=found.logprobs + 1) if way.compiled and layer.disable_adapters else found

    monkeypatch.setattr(Objective, "statistics", wrong_without_adapter)
    with caplog.at_level(logging.WARNING, "colocate_rl"):
        assert speedups.decide(args, policy, None, objective(), collectives).compiled == (beta == 0.0)
    assert ("without its adapter" in caplog.text) == (beta != 0.0)
    assert not layer.disable_adapters


def test_the_word_of_transformers(tmp_path: Path) -> None:
    args = GRPOConfig(str(tmp_path), use_cpu=True, torch_compile=True)
    assert args.compile_layers
    assert not args.torch_compile


def test_a_model_that_fails_the_check_stays_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(function: Any) -> Any:
        if function is head.pull:
            return function
        return lambda *given: tuple(1.5 * value for value in function(*given))

    monkeypatch.setattr(compiling, "install", lambda model: None)
    monkeypatch.setattr(head, "_compiled", wrong)
    model = tiny_model()
    with caplog.at_level(logging.WARNING, "colocate_rl"):
        assert not decide(tmp_path, model, compile_layers=True).compiled
    assert "layers run uncompiled: Qwen2ForCausalLM computes something else compiled" in caplog.text
