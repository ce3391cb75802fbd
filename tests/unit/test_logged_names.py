"""What a run logs is what docs/objective.md says, for every loss and in evaluation."""

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from colocate_rl import GRPOConfig, GRPOTrainer, engines
from colocate_rl.options import LossType, choices
from colocate_rl.rollout.rewardlog import RESERVED_METRICS
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.test_padding_free_run import LengthyEngine, even_ids
from tests.unit.test_routers import CONFIGS, make_model

pytestmark = [pytest.mark.unit, pytest.mark.timeout(240)]

DOCUMENT = Path(__file__).parents[2] / "docs/objective.md"
TRAINER_NAMES = {"grad_norm", "learning_rate", "epoch", "step"}
EVALUATION_CLOCK = {"runtime", "samples_per_second", "steps_per_second"}


def documented() -> dict[str, str]:
    """Each name of the table with the words that say when it is logged."""
    text = DOCUMENT.read_text()
    table = text[text.index("## Names in the log") : text.index("With `num_iterations` above 1")]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `")]
    return {name: when.strip() for names, when in rows for name in re.findall(r"`([^`]+)`", names.partition("(")[0])}


def is_logged(when: str, args: GRPOConfig, *, is_mixture: bool) -> bool:
    """What the words of the table mean for a configuration."""
    bonus = args.entropy_coef != 0 or args.use_adaptive_entropy
    meanings = {
        "with the correction for the engine's numerics": args.vllm_importance_sampling_correction,
        "`beta` is not 0": args.beta != 0,
        "the policy is a mixture of experts, and `router_aux_loss_coef` (or its own) is not 0": is_mixture,
        "there are several ranks, and the loss is not `bnpo`; not in evaluation": False,  # one process runs here
        "there are several engines; not in evaluation": args.num_vllm_gpus > 1,
        "with `dynamic_sampling`; not in evaluation": args.dynamic_sampling,
        "with tools": False,
        "there is an entropy bonus": bonus,
        "there is an entropy bonus; not in evaluation": bonus,
    }
    if when.startswith("always"):
        return True
    if when.startswith("`loss_type` is"):
        return args.loss_type in re.findall(r"`(\w+)`", when)[1:]
    return meanings[when]


def expected_names(args: GRPOConfig, *, in_evaluation: bool, is_mixture: bool) -> set[str]:
    names = set()
    for name, when in documented().items():
        if is_logged(when, args, is_mixture=is_mixture) and not (in_evaluation and "not in evaluation" in when):
            names.add(name.replace("<name>", "even_ids"))
    if in_evaluation:
        return names - TRAINER_NAMES
    return names


def simplified(name: str) -> str:
    """The name with the parts that the document leaves open."""
    name = re.sub(r"^engine/\d+/.*", "engine/<e>/…", re.sub(r"^rank/\d+/", "rank/<r>/", name))
    return re.sub(r"^(time|dynamic_sampling|tools)/.*", r"\1/…", name)


CASES: list[dict[str, Any]] = [
    *({"loss_type": name} for name in choices(LossType)),
    {"beta": 0.1, "vllm_importance_sampling_correction": False},
    {"entropy_coef": 0.1, "importance_sampling_level": "sequence", "loss_type": "luspo"},
    {"use_adaptive_entropy": True, "top_entropy_quantile": 0.5, "max_tokens_per_micro_batch": 40},
    {"top_entropy_quantile": 0.2, "padding_free": True, "off_policy_mask_threshold": 0.1},
    {"num_iterations": 2, "logging_steps": 2, "max_steps": 4, "eval_steps": 2},
    {"old_logprobs": "sampling", "vllm_importance_sampling_correction": False},
    {"multi_objective_aggregation": "normalize_then_sum", "mask_truncated_completions": True},
]


@pytest.mark.parametrize(
    ("changes", "is_mixture"),
    [*((changes, False) for changes in CASES), *((changes, True) for changes in CASES[-4:])],
    ids=lambda case: "-".join(map(str, case.values())) if isinstance(case, dict) else f"mixture-{case}",
)
def test_a_run_logs_the_documented_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], is_mixture: bool
) -> None:
    monkeypatch.setattr(engines, "build_engine", lambda *_: LengthyEngine())
    values: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 2,
        "num_generations": 2,
        "max_completion_length": 32,
        "max_steps": 2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "vllm_logprob_gap_limit": 0,
        "vllm_importance_sampling_mode": "token_truncate",
    }
    args = GRPOConfig(str(tmp_path), **{**values, **changes})
    prompts = datasets.Dataset.from_dict({"prompt": [f"{number}=" for number in range(9)]})
    trainer = GRPOTrainer(
        make_model(CONFIGS[0]) if is_mixture else tiny_model(),
        even_ids,
        args,
        prompts,
        prompts.select(range(3)),
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "step_time" in record]
    evaluations = [record for record in records if "eval_reward" in record]
    assert len(steps) == len(evaluations) == 2
    for record in steps:
        assert {simplified(name) for name in record} == expected_names(
            args, in_evaluation=False, is_mixture=is_mixture
        ) | {"step"}
    for record in evaluations:
        found = {name.removeprefix("eval_") for name in record}
        assert found - TRAINER_NAMES - EVALUATION_CLOCK == expected_names(
            args, in_evaluation=True, is_mixture=is_mixture
        )
    assert all(value is not None for record in [*steps, *evaluations] for value in record.values())
    assert all(torch.isfinite(weight).all() for weight in trainer.model.parameters())


def test_no_reward_function_can_log_under_a_documented_name() -> None:
    for name in documented():
        assert RESERVED_METRICS.match(name.replace("<name>", "x").replace("<e>", "0")), name
