"""Do the three schedules learn alike? The addition task of the demo, each ``overlap`` over several seeds.

    python benchmarks/learning_curves.py                        # about ten minutes on two idle CPU cores
    python benchmarks/learning_curves.py --seeds 1 2 --steps 30

One rank and one engine. Writes results.json and learning_curves.png into --output. Runs that results.json holds already
are not repeated.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.processes import REPOSITORY
from benchmarks.work import write_json
from benchmarks.worker import versions

MODES = ("none", "stream", "one_step")
COLOURS = {"none": "#4477AA", "stream": "#228833", "one_step": "#EE6677"}
ROWS, ACCUMULATION = 64, 4
SMOOTHED_STEPS = 10


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    add("--modes", nargs="+", default=list(MODES), choices=MODES)
    add("--steps", type=int, default=60, help="optimizer steps of each run (default: 60)")
    add("--output", type=Path, default=Path("runs/learning_curves"))
    return parser.parse_args(arguments)


def run(mode: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """Trains once; accuracy on held-out problems before and after, and the reward and staleness of each step."""
    from colocate_rl.report import load_metrics, series
    from examples.addition.demo import QUIET, Layout, launch_command

    flags = {
        "--overlap": mode,
        "--output_dir": folder / mode,
        "--max_steps": steps,
        "--eval_steps": steps,
        "--per_device_train_batch_size": ROWS,
        "--gradient_accumulation_steps": ACCUMULATION,
        "--vllm_max_num_seqs": ROWS,  # a quarter of the batch, so that groups finish one after the other
    }
    words = [str(word) for flag in flags.items() for word in flag]
    command = launch_command(Layout(num_ranks=1, num_engines=1, flags=tuple(words)), folder, seed)
    with (folder / f"{mode}.log").open("w") as log:
        environment = QUIET | dict(os.environ)
        subprocess.run(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)
    records = load_metrics(folder / mode)
    accuracy = [value for _, value in series(records, "eval_reward")]
    return {
        "mode": mode,
        "seed": seed,
        "accuracy_before": accuracy[0],
        "accuracy_after": accuracy[-1],
        "rewards": [value for _, value in series(records, "reward")],
        "staleness": [value for _, value in series(records, "staleness")],
    }


def compare(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread of each mode's accuracy, and how many standard errors the means of two modes are apart."""
    modes: dict[str, dict[str, float]] = {}
    for mode in dict.fromkeys(run["mode"] for run in runs):
        found = [run["accuracy_after"] for run in runs if run["mode"] == mode]
        deviation = statistics.stdev(found) if len(found) > 1 else 0.0
        modes[mode] = {"mean": statistics.mean(found), "standard_deviation": deviation, "runs": len(found)}
    apart = {}
    for one, other in itertools.combinations(modes, 2):
        a, b = modes[one], modes[other]
        error = (a["standard_deviation"] ** 2 / a["runs"] + b["standard_deviation"] ** 2 / b["runs"]) ** 0.5
        apart[f"{one} - {other}"] = {
            "difference": a["mean"] - b["mean"],
            "standard_errors": (a["mean"] - b["mean"]) / error if error else None,
        }
    return {"modes": modes, "differences": apart}


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Writes a PNG: each run's reward, smoothed, thin, and each mode's mean, thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for mode in dict.fromkeys(run["mode"] for run in runs):
        curves = [smoothed(run["rewards"]) for run in runs if run["mode"] == mode]
        for curve in curves:
            axes.plot(curve, color=COLOURS[mode], linewidth=0.6, alpha=0.5)
        mean = [statistics.mean(values) for values in zip(*curves, strict=True)]
        axes.plot(mean, color=COLOURS[mode], linewidth=2.2, label=f"{mode} ({len(curves)} seeds)")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(f"reward (mean of {SMOOTHED_STEPS} steps)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def smoothed(values: list[float]) -> list[float]:
    """Mean of each value and those before it."""
    return [statistics.mean(values[max(0, end - SMOOTHED_STEPS) : end]) for end in range(1, len(values) + 1)]


def main(arguments: list[str] | None = None) -> int:
    """Runs what is missing, compares, draws."""
    from examples.addition.make_model import make_model
    from examples.addition.task import make_splits, write_jsonl

    options = parse(arguments)
    output = options.output.resolve()
    path = output / "results.json"
    output.mkdir(parents=True, exist_ok=True)
    kept = json.loads(path.read_text()) if path.is_file() else {"steps": options.steps, "runs": []}
    if kept["steps"] != options.steps:
        print(f"learning_curves: {path} is about {kept['steps']} steps. Choose another --output.", file=sys.stderr)
        return 1
    runs: list[dict[str, Any]] = kept["runs"]
    for seed, mode in itertools.product(options.seeds, options.modes):
        if any((run["seed"], run["mode"]) == (seed, mode) for run in runs):
            continue
        folder = output / f"seed-{seed}"
        if not (folder / "model").is_dir():
            make_model(folder / "model", seed)
            splits = make_splits(seed)
            write_jsonl(splits.train, folder / "train.jsonl")
            write_jsonl(splits.held_out, folder / "held_out.jsonl")
        runs.append(run(mode, seed, options.steps, folder))
        print(f"seed {seed}, {mode}: {runs[-1]['accuracy_before']:.3f} -> {runs[-1]['accuracy_after']:.3f}", flush=True)
        results = {"steps": options.steps, "versions": versions(), **compare(runs), "runs": runs}
        write_json(path, results)  # after each run, so that none is lost
    draw(runs, output / "learning_curves.png")
    for mode, figures in compare(runs)["modes"].items():
        print(f"{mode:9s} {figures['mean']:.3f} ± {figures['standard_deviation']:.3f} ({figures['runs']} seeds)")
    for pair, figures in compare(runs)["differences"].items():
        print(f"{pair}: {figures['difference']:+.3f}, {figures['standard_errors'] or 0:+.1f} standard errors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
