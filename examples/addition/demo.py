"""The whole thing on one machine, GPUs or not: make a tiny model, train it with GRPO, show what happened.

``python -m examples.addition.demo --seed N [--out runs/demo]``

Leaves in that folder: ``progress.png``, ``summary.json``, the data, the model before (``model``) and after
(``training``).
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

from colocate_rl.errors import DataError
from colocate_rl.report import PLOT_FILE, engine_shares, engine_table, load_metrics, plot_run, series
from examples.addition.make_model import make_model
from examples.addition.task import make_splits, write_jsonl

REPOSITORY = Path(__file__).resolve().parents[2]

NUM_STEPS = 120
NUM_PROMPTS = 32
NUM_GENERATIONS = 8
MAX_COMPLETION_LENGTH = 8
LEARNING_RATE = 1e-3
NUM_WARMUP_STEPS = 10

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}
"""Environment of the launch, unless it is set already: no download, and a table not buried in notices."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ranks train, and where the engines run."""

    num_ranks: int
    flags: tuple[str, ...] = ()
    num_engines: int = 2

    @property
    def num_rows(self) -> int:
        """Completions of one step on each rank: whole groups."""
        return NUM_GENERATIONS * -(-NUM_PROMPTS // self.num_ranks)


def choose_layout(num_gpus: int) -> Layout:
    """Two ranks and two engines on whatever there is; on a single GPU one of each, which share it."""
    shared = ("--vllm_gpu_memory_utilization", "0.3")
    if num_gpus == 0:
        return Layout(num_ranks=2)
    if num_gpus == 1:
        return Layout(num_ranks=1, num_engines=1, flags=("--vllm_devices", "0", *shared))
    if num_gpus == 2:
        return Layout(num_ranks=2, flags=("--vllm_devices", "1,0", *shared))
    if num_gpus == 3:
        return Layout(num_ranks=2, flags=("--vllm_devices", "2,0", *shared))
    return Layout(num_ranks=num_gpus - 2)


def launch_command(layout: Layout, out: Path, seed: int) -> list[str]:
    """The one launch that starts ranks and engines."""
    settings = {
        "--model": out / "model",
        "--dataset": out / "train.jsonl",
        "--eval-dataset": out / "held_out.jsonl",
        "--reward-funcs": "examples.addition.task:correct_sum",
        "--num-vllm-gpus": layout.num_engines,
        "--output_dir": out / "training",
        "--seed": seed,
        "--max_steps": NUM_STEPS,
        "--per_device_train_batch_size": layout.num_rows,
        "--num_generations": NUM_GENERATIONS,
        "--num_generations_eval": 1,
        "--max_completion_length": MAX_COMPLETION_LENGTH,
        "--learning_rate": LEARNING_RATE,
        "--warmup_steps": NUM_WARMUP_STEPS,
        "--eval_on_start": True,
        "--eval_strategy": "steps",
        "--eval_steps": NUM_STEPS,
        "--save_strategy": "no",
        "--logging_steps": 1,
    }
    return [
        *(sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(layout.num_ranks)),
        *("-m", "colocate_rl.grpo"),
        *(str(word) for setting in settings.items() for word in setting),
        "--live_table",
        *layout.flags,
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="GRPO on two-digit addition with in-process engines.")
    parser.add_argument("--seed", type=int, default=1, help="Decides everything: problems, weights, sampling.")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="Folder for what the demo leaves.")
    arguments = parser.parse_args()
    run_demo(arguments.out.resolve(), arguments.seed, Console())


def run_demo(out: Path, seed: int, console: Console) -> None:
    """Make, train, report."""
    start = time.perf_counter()
    layout = choose_layout(torch.cuda.device_count())
    for name in ("summary.json", PLOT_FILE):
        (out / name).unlink(missing_ok=True)
    shutil.rmtree(out / "training", ignore_errors=True)

    console.rule("A tiny model that adds about half right")
    facts = make_model(out / "model", seed)
    splits = make_splits(seed)
    write_jsonl(splits.train, out / "train.jsonl")
    write_jsonl(splits.held_out, out / "held_out.jsonl")
    console.print(
        f"{facts['num_parameters']:,} parameters, held-out accuracy "
        f"{facts['accuracy_sampled']:.1%} sampled, {facts['accuracy_greedy']:.1%} greedy; {len(splits.train)} "
        f"problems to train on, {len(splits.held_out)} held out.",
        soft_wrap=True,
    )

    console.rule(f"GRPO: {layout.num_ranks} training rank(s), {layout.num_engines} engine(s) inside")
    train(launch_command(layout, out, seed), console)

    console.rule("What happened")
    report(out, seed, start, console)


def train(command: list[str], console: Console) -> None:
    """Run the launch and pass its output on; leave with a message if it fails."""
    console.print(shlex.join(["accelerate", "launch", *command[3:]]), style="dim", soft_wrap=True, highlight=False)
    status = subprocess.run(command, cwd=REPOSITORY, env=QUIET | dict(os.environ), check=False).returncode
    if status:
        sys.stdout.flush()
        raise SystemExit(f"The demo stops here: training failed with exit status {status}. Its own message is above.")


def report(out: Path, seed: int, start: float, console: Console) -> None:
    """Print and write down what the run's figures say."""
    try:
        records = load_metrics(out / "training")
    except DataError as error:
        raise SystemExit(f"Training ended without figures. {error}") from None
    accuracy = series(records, "eval_reward")
    if len(accuracy) < 2 or accuracy[-1][0] != NUM_STEPS:
        raise SystemExit(f"Held-out accuracy was not measured before and after training: {accuracy}.")
    shares = engine_shares(records)
    plot_run(records, out / PLOT_FILE)
    before, after = accuracy[0][1], accuracy[-1][1]
    seconds = time.perf_counter() - start
    summary = {
        "seed": seed,
        "accuracy_before": round(before, 4),
        "accuracy_after": round(after, 4),
        "seconds": round(seconds, 1),
        "engines": [asdict(share) | {"seconds": round(share.seconds, 2)} for share in shares],
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", "utf-8")
    console.print(engine_table(shares))
    console.print(
        f"Held-out accuracy: [bold]{before:.1%}[/] before, [bold green]{after:.1%}[/] after {NUM_STEPS} steps; "
        f"the demo took {seconds:.0f} s.\nPlot: {out / PLOT_FILE}\nSummary: {out / 'summary.json'}",
        soft_wrap=True,
        highlight=False,
    )


if __name__ == "__main__":
    main()
