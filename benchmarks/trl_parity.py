"""Do the same completions give the same losses, gradients and figures here and in TRL 1.16?

    python benchmarks/trl_parity.py --trl-python /path/to/an/environment/with/trl/bin/python
    python benchmarks/trl_parity.py --trl-python … --record tests/parity/trl.json

Each case is a setting of the objective. Both systems train the same tiny model from the same prompts with a
``rollout_func`` that gives scripted completions, for a few optimizer steps on the CPU in float32; what they log is
compared. ``--record`` keeps TRL's figures, against which the tests compare without TRL.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

STEPS = 3
GENERATIONS = 4
PROMPTS = 4
"""Per step."""
MAX_COMPLETION_LENGTH = 12
COMPARED = (
    "loss",
    "grad_norm",
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "entropy",
    "kl",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "completions/mean_length",
    "completions/clipped_ratio",
    "completions/mean_terminated_length",
    "num_tokens",
)
"""Log keys that both systems write under the same name."""

OFF_POLICY = {"num_iterations": 2, "learning_rate": 3e-2}
"""The second update of each generation batch has ratios far from 1, so that clipping shows."""
CASES: dict[str, dict[str, Any]] = {
    **{
        name: {"loss_type": name, **OFF_POLICY}
        for name in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
    },
    "accumulated dapo": {"loss_type": "dapo", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    "accumulated grpo": {"loss_type": "grpo", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    "kl": {"beta": 0.1, "loss_type": "grpo", **OFF_POLICY},
    "bias-corrected kl": {"beta": 0.1, "use_bias_correction_kl": True, **OFF_POLICY},
    "sequence level": {
        "importance_sampling_level": "sequence",
        "loss_type": "grpo",
        "epsilon": 3e-3,
        "epsilon_high": 4e-3,
        **OFF_POLICY,
    },
    "clip higher": {"epsilon": 0.1, "epsilon_high": 0.3, **OFF_POLICY},
    "two-sided clipping": {"delta": 1.5, **OFF_POLICY},
    "batch-scaled rewards": {"scale_rewards": "batch"},
    "unscaled rewards": {"scale_rewards": "none", "loss_type": "dr_grpo"},
    "truncated completions masked": {"mask_truncated_completions": True},
    "high-entropy tokens": {"top_entropy_quantile": 0.3},
    "off-policy mask": {"off_policy_mask_threshold": 0.05, **OFF_POLICY},
    "temperature": {"temperature": 0.7, "beta": 0.05, **OFF_POLICY},
    "two rewards": {"reward_weights": [1.0, 0.5]},
    "two rewards, normalised apart": {
        "reward_weights": [1.0, 0.5],
        "multi_objective_aggregation": "normalize_then_sum",
    },
    "moving reference": {
        "beta": 0.1,
        "sync_ref_model": True,
        "ref_model_sync_steps": 1,
        "ref_model_mixup_alpha": 0.5,
        **OFF_POLICY,
    },
}


def completion_of(prompt: str, copy: int) -> list[int]:
    """The scripted completion: random ids that end with the end-of-sequence id, or are cut off without one."""
    source = random.Random(f"{prompt}/{copy}")
    length = source.randint(1, MAX_COMPLETION_LENGTH)
    ids = [source.randrange(256) for _ in range(length)]
    return ids if length == MAX_COMPLETION_LENGTH else [*ids[:-1], 256]


def scripted(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    """A ``rollout_func``: the n-th time that a prompt occurs it gets its n-th completion."""
    seen: dict[str, int] = {}
    completions = []
    for prompt in prompts:
        completions.append(completion_of(prompt, seen.get(prompt, 0)))
        seen[prompt] = seen.get(prompt, 0) + 1
    return {
        "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": completions,
        "logprobs": [[-5.0] * len(ids) for ids in completions],
    }


def low_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Share of ids below 100."""
    return [sum(token < 100 for token in ids) / len(ids) for ids in completion_ids]


def short(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Prefers short completions."""
    return [-len(ids) / MAX_COMPLETION_LENGTH for ids in completion_ids]


def prompts() -> list[str]:
    """Different prompts of several lengths."""
    return [f"{number * 37}+{number}=" for number in range(PROMPTS * STEPS)]


def settings(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Configuration that both systems take."""
    return {
        "output_dir": str(folder),
        "use_vllm": False,
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": PROMPTS * GENERATIONS,
        "gradient_accumulation_steps": 1,
        "num_generations": GENERATIONS,
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 7,
        "model_init_kwargs": {"dtype": "float32"},
        **case,
    }


def figures(trainer: Any) -> list[dict[str, float]]:
    """What each step logged, of :data:`COMPARED`."""
    steps = [line for line in trainer.state.log_history if "loss" in line]
    return [{name: float(line[name]) for name in COMPARED if line.get(name) is not None} for line in steps]


def train(system: str, case: dict[str, Any], model: Path, folder: Path) -> list[dict[str, float]]:
    """Runs one case in this process."""
    import datasets

    if system == "trl":
        from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]
    else:
        from colocate_rl import GRPOConfig, GRPOTrainer
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=[low_ids, short] if "reward_weights" in case else low_ids,
        args=GRPOConfig(**settings(case, folder)),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts()}),
        rollout_func=scripted,
    )
    trainer.train()
    return figures(trainer)


def make_model(folder: Path) -> Path:
    """The tiny model of both systems."""
    from benchmarks.work import make_model as make

    make("tiny", folder, seed=7)
    return folder


def worker(system: str, names: list[str], model: Path, result: Path) -> None:
    """Runs cases one after another and writes what they logged."""
    import traceback

    found: dict[str, Any] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[name] = train(system, CASES[name], model, Path(folder))
            except Exception:
                found[name] = traceback.format_exc()
        result.write_text(json.dumps(found, indent=1) + "\n")


def measure(system: str, python: str, names: list[str], model: Path, output: Path) -> dict[str, Any]:
    """Runs the cases of one system in a process of its own."""
    result = output / f"{system}.json"
    words = ["--worker", system, "--cases", *names, "--model", str(model), "--output", str(result)]
    environment = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    log = output / f"{system}.log"
    with log.open("w") as stream:
        done = subprocess.run(
            [python, str(Path(__file__).resolve()), *words], env=environment, stdout=stream, stderr=stream, check=False
        )
    if done.returncode or not result.is_file():
        raise SystemExit(f"benchmarks: error: {system} ended with status {done.returncode}; see {log}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def differences(mine: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, float]:
    """Per log key the largest difference over the steps, relative to the value where that is above 1."""
    if len(mine) != len(theirs):
        return {"steps": float("inf")}
    worst: dict[str, float] = {}
    for step, other in zip(mine, theirs, strict=True):
        for name, value in other.items():
            gap = abs(step[name] - value) / max(1.0, abs(value)) if name in step else float("inf")
            worst[name] = max(gap, worst.get(name, 0.0))
    return worst


def report(mine: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Prints one line per case; returns the largest difference of loss and gradient norm."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Largest differences over {STEPS} optimizer steps")
    for name in ("case", "loss", "gradient norm", "the worst other", "which"):
        table.add_column(name)
    largest = 0.0
    for name, figures_of_trl in theirs.items():
        ours = mine[name]
        if isinstance(ours, str) or isinstance(figures_of_trl, str):
            said = [text.strip().splitlines()[-1] for text in (ours, figures_of_trl) if isinstance(text, str)]
            table.add_row(name, *["-"] * 3, " / ".join(said))
            largest = float("inf")
            continue
        gaps = differences(ours, figures_of_trl)
        core = [gaps.pop("loss", float("inf")), gaps.pop("grad_norm", float("inf"))]
        worst = max(gaps, key=lambda key: gaps[key])
        table.add_row(name, *(f"{gap:.1e}" for gap in (*core, gaps[worst])), worst)
        largest = max(largest, *core)
    Console(width=150).print(table)
    return largest


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=sys.executable, help="Python that can import TRL 1.16")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--record", type=Path, help="file that keeps TRL's figures")
    parser.add_argument("--output", type=Path, default=Path("runs/trl_parity"))
    parser.add_argument("--worker", choices=("ours", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 where losses or gradient norms differ by more than 1e-5."""
    options = parse(arguments)
    if options.worker:
        worker(options.worker, options.cases, options.model, options.output)
        return 0
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    model = make_model(output / "model")
    theirs = measure("trl", options.trl_python, options.cases, model, output)
    if options.record:
        options.record.write_text(json.dumps(theirs, indent=1) + "\n")
    mine = measure("ours", sys.executable, options.cases, model, output)
    largest = report(mine, theirs)
    print(f"Largest difference of losses and gradient norms: {largest:.1e}. Written: {output}")
    return 0 if largest <= 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
