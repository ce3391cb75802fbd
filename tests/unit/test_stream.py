"""A streamed step is the step of a batch that came at once, in whatever order the groups finish."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from colocate_rl import GRPOConfig, GRPOTrainer, engines, options
from colocate_rl.engine.protocol import Completion, SamplingSpec, Span, Work
from colocate_rl.errors import ConfigError, EngineError
from colocate_rl.training import aggregation
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.test_padding_free_run import LengthyEngine, even_ids, run  # noqa: F401 - a fixture

pytestmark = pytest.mark.unit

FIGURES = (
    "loss", "grad_norm", "entropy", "kl", "reward", "reward_std", "frac_reward_zero_std", "rewards/even_ids/std",
    "completions/mean_length", "completions/min_length", "completions/max_length", "completions/clipped_ratio",
    "completions/min_terminated_length", "prompts/mean_length", "num_tokens", "engine/0/tokens", "engine/0/prompts",
    "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max", "staleness",
)  # fmt: skip


class TricklingEngine(LengthyEngine):
    """Finishes requests in a random order, some at a time, and now and then none."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._left: list[tuple[int, list[Completion]]] = []
        self.sizes: list[int] = []

    def begin(self, work: Work, sampling: SamplingSpec) -> None:
        assert not self._left
        self._left = list(enumerate(self.generate(work.requests, sampling)))
        self._draw.shuffle(self._left)

    def poll(self, timeout_s: float) -> list[tuple[int, list[Completion]]]:
        self.sizes.append(self._draw.randrange(3))
        return [self._left.pop() for _ in range(min(self.sizes[-1], len(self._left)))]

    def finish(self) -> tuple[list[tuple[int, list[Completion]]], Span]:
        rest, self._left = self._left, []
        return rest, Span(0.0, 1.0)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "dapo"},
        {"loss_type": "grpo"},
        {"loss_type": "dr_grpo"},
        {"loss_type": "bnpo"},
        {"loss_type": "cispo"},
        {"loss_type": "sapo"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss_type": "vespo", "num_iterations": 1},
        {"loss_type": "dapo", "max_tokens_per_micro_batch": 48},
        {"loss_type": "bnpo", "max_tokens_per_micro_batch": 48, "num_iterations": 1},
        {"loss_type": "dapo", "gradient_accumulation_steps": 1, "per_device_train_batch_size": 16},
        {"loss_type": "dapo", "gradient_accumulation_steps": 4, "padding_free": True, "old_logprobs": "sampling"},
        {"loss_type": "grpo", "mask_truncated_completions": True, "scale_rewards": "none", "num_iterations": 1},
    ],
    ids=str,
)
def test_gradient_and_figures_are_those_of_none(
    run: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
) -> None:
    _, expected, lines = run(**settings)
    start = dict(tiny_model(tied=False).named_parameters())
    moved = max(float((expected[name] - weight.detach()).abs().max()) for name, weight in start.items())
    assert moved > 1e-3
    for order in (1, 2):
        engine = TricklingEngine(order)
        monkeypatch.setattr(engines, "build_engine", lambda *_, built=engine: built)
        trainer, weights, log = run(overlap="stream", **settings)
        assert sum(engine.sizes) > 8
        assert 0 in engine.sizes
        assert trainer.state.global_step == 3
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-5 * moved, msg=lambda m, n=name: n + m)
        for line, same in zip(lines, log, strict=True):
            for name in FIGURES:
                assert (name in same) == (name in line), name
                if name in line:
                    assert same[name] == pytest.approx(line[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 2}, "steps_per_generation=4 must be"),
        ({"steps_per_generation": 1, "gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"),
        ({"scale_rewards": "batch"}, "scale_rewards='batch' needs all rewards"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "needs all rewards"),
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile=0.2 needs the entropies"),
        ({"entropy_coef": 0.1}, "entropy_coef=0.1 needs the tokens"),
        ({"dynamic_sampling": True}, "dynamic_sampling"),
    ],
)
def test_what_cannot_be_streamed_is_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GRPOConfig(str(tmp_path), overlap="stream", **settings)


def test_experts_that_need_their_slice_are_refused(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=288, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    args = GRPOConfig(str(tmp_path), overlap="stream", max_completion_length=8)
    prompts = datasets.Dataset.from_dict({"prompt": ["1=", "2="]})
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"load-balancing loss of Qwen3MoeConfig \(weight 0.001\) needs the experts"):
        GRPOTrainer(model, even_ids, args, prompts, processing_class=tiny_tokenizer())


def test_every_loss_says_what_it_divides_by() -> None:
    assert aggregation.DENOMINATORS.keys() == aggregation.AGGREGATIONS.keys() == set(options.choices(options.LossType))


class StumblingEngine(TricklingEngine):
    """Fails in the middle of its first batch."""

    polls = 0

    def poll(self, timeout_s: float) -> list[tuple[int, list[Completion]]]:
        self.polls += 1
        if self.polls == 3:
            raise EngineError("it stumbled")
        return super().poll(timeout_s)


def test_a_run_that_failed_can_be_started_again(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    _, expected, _ = run(num_iterations=1)
    monkeypatch.setattr(engines, "build_engine", lambda *_: StumblingEngine(1))
    made: list[GRPOTrainer] = []
    train = GRPOTrainer.train

    def train_twice(trainer: GRPOTrainer) -> Any:
        made.append(trainer)
        with pytest.raises(EngineError, match="it stumbled"):
            train(trainer)
        trainer.model.zero_grad()
        return train(trainer)

    monkeypatch.setattr(GRPOTrainer, "train", train_twice)
    trainer, weights, log = run(overlap="stream", num_iterations=1)
    assert made == [trainer]
    assert len(log) == 3
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-5, msg=lambda m, n=name: n + m)


def test_a_timeline_says_who_did_what_when(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # noqa: F811
    def steps(**changes: Any) -> list[dict[str, Any]]:
        (tmp_path / "timeline.jsonl").unlink(missing_ok=True)
        run(log_timeline=True, num_iterations=1, **changes)
        return [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]

    events = steps()
    assert all(event["end"] > event["start"] for event in events)
    assert [event["start"] for event in events] == sorted(event["start"] for event in events)
    ranks = [event for event in events if event.get("rank") == 0]
    assert {event["phase"] for event in ranks} == {"generate", "score", "sync", "train"}
    for one, following in itertools.pairwise(ranks):
        assert following["start"] >= one["end"]
    waits = [event for event in ranks if event["phase"] == "generate"]
    engine = [event for event in events if event.get("engine") == 0]
    assert len(engine) == 3
    for event in engine:  # an engine inside the rank works while the rank waits for it
        assert any(wait["start"] <= event["start"] <= event["end"] <= wait["end"] for wait in waits)
    monkeypatch.setattr(engines, "build_engine", lambda *_: TricklingEngine(4))
    streamed = [event["phase"] for event in steps(overlap="stream") if event.get("rank") == 0]
    first = streamed[: streamed.index("sync", 1 + streamed.index("sync"))]
    assert first.count("generate") > 2 < first.count("train"), "waits and passes take turns"
