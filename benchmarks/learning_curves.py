"""Do the schedules learn alike, and as TRL does? The addition task of the demo, each mode over several seeds.

    python benchmarks/learning_curves.py                        # the schedules; about ten minutes on two idle CPU cores
    python benchmarks/learning_curves.py --seeds 1 2 --steps 30
    python benchmarks/learning_curves.py --modes none transformers trl --trl-python ENVIRONMENT/bin/python
    python benchmarks/learning_curves.py --modes none trl --seeds 1 2 3 --steps 100 --parallel 3    # on GPUs

One rank. ``none``, ``stream`` and ``one_step`` are the values of ``overlap``, with one vLLM engine (on a GPU of its own
where there are two, on the rank's where there is one); ``transformers`` is ours with ``use_vllm=False``; ``trl`` is
TRL's GRPOTrainer with its own generation, in the interpreter ``--trl-python``, with the settings of ``transformers``
down to the defaults (learning_trl.py). All modes of a seed get the same model, problems and settings.

Writes results.json and learning_curves.png into --output. Runs that results.json holds already are not repeated. Modes
are compared by accuracy on held-out problems after training, and by mean reward over the last quarter of the steps and
over all of them (the area under the curve). Two numbers of standard errors say how far apart two means are:
``standard_errors`` takes all runs for independent; ``paired_standard_errors`` looks at the differences seed by seed,
free of what a seed's model and problems do to both modes. Few seeds tell their own noise badly: chance alone leaves
95 of 100 pairs of equal modes within 4.3 standard errors seed by seed for three seeds, 2.8 for five (Student's t).
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.processes import REPOSITORY, RunError, child_environment, last_error, visible_devices
from benchmarks.work import write_json
from benchmarks.worker import versions
from examples.addition.demo import QUIET, Layout, launch_command
from examples.addition.make_model import make_model
from examples.addition.task import make_splits, write_jsonl

Run = dict[str, Any]

SCHEDULES = ("none", "stream", "one_step")
WITHOUT_ENGINE = ("transformers", "trl")
MODES = (*SCHEDULES, *WITHOUT_ENGINE)
COLOURS = {
    "none": "#4477AA",
    "stream": "#228833",
    "one_step": "#EE6677",
    "transformers": "#CCBB44",
    "trl": "#AA3377",
}
ROWS, ACCUMULATION = 64, 4
ENGINE_MEMORY = {
    "--vllm_gpu_memory_utilization": 0.05,
    "--vllm_engine_kwargs": json.dumps({"kv_cache_memory_bytes": 1 << 26}),
}
"""Of an engine on a GPU: several runs share the device, and a batch of this tiny model fills 2 MiB of cache."""
SMOOTHED_STEPS = 10


def last_quarter(run: Run) -> float:
    """Mean reward of the last quarter of the steps, at least one."""
    rewards: list[float] = run["rewards"]
    return statistics.mean(rewards[-max(1, len(rewards) // 4) :])


CURVES: dict[str, Callable[[Run], float]] = {
    "reward_last_quarter": last_quarter,
    "reward_all_steps": lambda run: statistics.mean(run["rewards"]),
}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    add("--modes", nargs="+", default=list(SCHEDULES), choices=MODES)
    add("--steps", type=int, default=60, help="optimizer steps of each run (default: 60)")
    add("--parallel", type=int, default=1, metavar="P", help="runs at once on this machine (default: 1)")
    add("--trl-python", default=sys.executable, metavar="FILE", help="Python that can import TRL 1.16, for trl")
    add("--output", type=Path, default=Path("runs/learning_curves"))
    options = parser.parse_args(arguments)
    if options.parallel < 1:
        parser.error(f"--parallel {options.parallel} would run nothing; it must be at least 1")
    options.trl_python = os.path.abspath(shutil.which(options.trl_python) or options.trl_python)  # runs start elsewhere
    return options


def trl_version(python: str) -> str:
    """Version of TRL in another interpreter.

    Raises:
        RunError: when it cannot import TRL's trainer and this package, with its last line of output.
    """
    code = "import trl, colocate_rl; from trl import GRPOTrainer; print(trl.__version__)"
    try:
        done = subprocess.run(
            [python, "-c", code], env=QUIET | child_environment(), capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise RunError(f"The mode trl needs a Python with TRL 1.16, but {error}. Set --trl-python.") from None
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["no output"]
    if done.returncode:
        raise RunError(
            f"The mode trl needs TRL 1.16, which {python} cannot import: {said[-1]}. Name a Python that can with "
            "--trl-python, or leave trl out of --modes."
        )
    return said[-1]


def command(mode: str, seed: int, steps: int, folder: Path, trl_python: str, *, num_gpus: int) -> list[str]:
    """The command of one run; that of ``trl`` differs from that of ``transformers`` in who reads it."""
    flags: dict[str, Any] = {
        "--output_dir": folder / mode,
        "--max_steps": steps,
        "--eval_steps": steps,
        "--per_device_train_batch_size": ROWS,
        "--gradient_accumulation_steps": ACCUMULATION,
        "--dtype": "float32",
    }
    if mode in WITHOUT_ENGINE:
        flags["--use_vllm"] = False
    else:
        flags["--overlap"] = mode
        flags["--vllm_max_num_seqs"] = ROWS  # a quarter of the batch, so that groups finish one after the other
        if num_gpus:
            flags |= ENGINE_MEMORY
        if num_gpus == 1:
            flags["--vllm_devices"] = 0
    words = [str(word) for flag in flags.items() for word in flag]
    layout = Layout(num_ranks=1, num_engines=0 if mode in WITHOUT_ENGINE else 1, flags=tuple(words))
    launched = launch_command(layout, folder, seed)
    if mode != "trl":
        return launched
    return [trl_python, "-m", "benchmarks.learning_trl", *launched[launched.index("colocate_rl.grpo") + 1 :]]


def placed(mode: str, place: int, devices: Sequence[str]) -> str:
    """GPUs of a run for CUDA_VISIBLE_DEVICES; each mode goes around them by the ``place`` of its seed among the seeds.

    An engine has a GPU of its own, next to its rank's; where there is one GPU only, both share it.
    """
    if not devices:
        return ""
    ordered = [devices[(place + number) % len(devices)] for number in range(len(devices))]
    return ",".join(ordered[: 1 if mode in WITHOUT_ENGINE else 2])


def run(mode: str, seed: int, folder: Path, words: Sequence[str], environment: dict[str, str]) -> Run:
    """Trains once; accuracy on held-out problems before and after, and the reward and staleness of each step.

    Raises:
        RunError: when training fails.
    """
    from colocate_rl.report import load_metrics, series

    log, start = folder / f"{mode}.log", time.monotonic()
    with log.open("w") as output:
        done = subprocess.run(
            words, cwd=REPOSITORY, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        raise RunError(f"{last_error(log)} (exit status {done.returncode}, log: {log})")
    records = load_metrics(folder / mode)
    accuracy = [value for _, value in series(records, "eval_reward")]
    return {
        "mode": mode,
        "seed": seed,
        "seconds": round(time.monotonic() - start, 1),
        "accuracy_before": accuracy[0],
        "accuracy_after": accuracy[-1],
        "rewards": [value for _, value in series(records, "reward")],
        "staleness": [value for _, value in series(records, "staleness")],
    }


def compare(runs: list[Run]) -> dict[str, Any]:
    """How far apart modes are: in accuracy after training, and under ``curves`` in each figure of :data:`CURVES`."""
    return {
        **apart(runs, lambda run: run["accuracy_after"]),
        "curves": {name: apart(runs, figure) for name, figure in CURVES.items()},
    }


def apart(runs: list[Run], figure: Callable[[Run], float]) -> dict[str, Any]:
    """Mean and spread of a figure in each mode, and how many standard errors the means of two modes are apart."""
    found = {
        mode: {run["seed"]: figure(run) for run in runs if run["mode"] == mode}
        for mode in dict.fromkeys(run["mode"] for run in runs)
    }
    modes = {mode: spread(list(values.values())) for mode, values in found.items()}
    differences = {}
    for one, other in itertools.combinations(modes, 2):
        a, b = modes[one], modes[other]
        pairs = [found[one][seed] - found[other][seed] for seed in sorted(found[one].keys() & found[other].keys())]
        differences[f"{one} - {other}"] = {
            "difference": a["mean"] - b["mean"],
            "standard_errors": in_standard_errors(a["mean"] - b["mean"], a, b),
            "paired_standard_errors": in_standard_errors(statistics.mean(pairs), spread(pairs)) if pairs else None,
        }
    return {"modes": modes, "differences": differences}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation (0 for a single value) and number."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.mean(values), "standard_deviation": deviation, "runs": len(values)}


def in_standard_errors(difference: float, *spreads: dict[str, float]) -> float | None:
    """A difference of means over its standard error; None where single runs, or equal ones, do not tell the error."""
    error = sum(figures["standard_deviation"] ** 2 / figures["runs"] for figures in spreads) ** 0.5
    return difference / error if error and all(figures["runs"] > 1 for figures in spreads) else None


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
        style = "--" if mode == "stream" else "-"  # its curve is that of none where the engine's samples are the same
        axes.plot(mean, style, color=COLOURS[mode], linewidth=2.2, label=f"{mode} ({len(curves)} seeds)")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(f"reward (mean of {SMOOTHED_STEPS} steps)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def smoothed(values: list[float]) -> list[float]:
    """Mean of each value and those before it."""
    return [statistics.mean(values[max(0, end - SMOOTHED_STEPS) : end]) for end in range(1, len(values) + 1)]


def prepare(folder: Path, seed: int) -> None:
    """Makes what all modes of a seed share: the model and the problems."""
    if (folder / "held_out.jsonl").is_file():
        return
    make_model(folder / "model", seed)
    splits = make_splits(seed)
    write_jsonl(splits.train, folder / "train.jsonl")
    write_jsonl(splits.held_out, folder / "held_out.jsonl")


def show(compared: dict[str, Any]) -> None:
    """Prints each figure of the modes and of their differences."""
    for name, part in {"accuracy_after": compared, **compared["curves"]}.items():
        print(name)
        for mode, figures in part["modes"].items():
            print(f"  {mode:12s} {figures['mean']:.3f} ± {figures['standard_deviation']:.3f} ({figures['runs']} seeds)")
        for pair, figures in part["differences"].items():
            errors = [figures[key] for key in ("standard_errors", "paired_standard_errors")]
            said = ["-" if error is None else f"{error:+.1f}" for error in errors]
            print(f"  {pair}: {figures['difference']:+.3f}, {said[0]} standard errors, {said[1]} seed by seed")


def at_once(jobs: Mapping[str, Callable[[], Run]], parallel: int) -> Iterator[tuple[str, Run | RunError]]:
    """Does some jobs at a time; yields each name, as they end, with what came of it."""
    with ThreadPoolExecutor(parallel) as pool:
        names = {pool.submit(job): name for name, job in jobs.items()}
        try:
            for future in as_completed(names):
                error = future.exception()
                yield names[future], error if isinstance(error, RunError) else future.result()
        finally:
            pool.shutdown(cancel_futures=True)  # when interrupted, what has not begun need not


def run_missing(options: argparse.Namespace, output: Path, kept: dict[str, Any]) -> list[str]:
    """Runs what ``kept`` does not hold yet, ``--parallel`` at a time, and writes results.json after each.

    Returns:
        What went wrong with runs that failed; the others go on.

    Raises:
        RunError: before anything runs, where it could not.
    """
    import torch

    runs: list[Run] = kept["runs"]
    asked = dict.fromkeys(itertools.product(options.seeds, options.modes))
    missing = [pair for pair in asked if pair not in {(run["seed"], run["mode"]) for run in runs}]
    devices = visible_devices(torch.cuda.device_count())
    places = [placed(mode, options.seeds.index(seed), devices) for seed, mode in missing]
    known = {**kept.get("versions", {}), **versions()}
    if any(mode == "trl" for _, mode in missing):
        known["trl"] = trl_version(options.trl_python)
    shared = {}
    if options.parallel > 1:  # torch would give every core to every run
        shared["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // options.parallel))
    jobs = {}
    for (seed, mode), place in zip(missing, places, strict=True):
        folder = output / f"seed-{seed}"
        prepare(folder, seed)
        words = command(mode, seed, options.steps, folder, options.trl_python, num_gpus=len(devices))
        environment = QUIET | shared | child_environment(CUDA_VISIBLE_DEVICES=place)
        jobs[f"seed {seed}, {mode}"] = partial(run, mode, seed, folder, words, environment)
    failed = []
    for name, done in at_once(jobs, options.parallel):
        if isinstance(done, RunError):
            failed.append(f"{name}: {done}")
            continue
        runs.append(done)
        runs.sort(key=lambda run: (run["seed"], MODES.index(run["mode"])))
        print(f"{name}: {done['accuracy_before']:.3f} -> {done['accuracy_after']:.3f}, {done['seconds']} s", flush=True)
        results = {"steps": options.steps, "versions": known, **compare(runs), "runs": runs}
        write_json(output / "results.json", results)  # after each run, so that none is lost
    return failed


def main(arguments: list[str] | None = None) -> int:
    """Runs what is missing, compares, draws; returns 1 when something could not run."""
    options = parse(arguments)
    output = options.output.resolve()
    path = output / "results.json"
    output.mkdir(parents=True, exist_ok=True)
    kept = json.loads(path.read_text()) if path.is_file() else {"steps": options.steps, "runs": []}
    if kept["steps"] != options.steps:
        print(f"learning_curves: {path} is about {kept['steps']} steps. Choose another --output.", file=sys.stderr)
        return 1
    try:
        failed = run_missing(options, output, kept)
    except RunError as error:
        print(f"learning_curves: {error}", file=sys.stderr)
        return 1
    if kept["runs"]:
        draw(kept["runs"], output / "learning_curves.png")
        show(compare(kept["runs"]))
    for message in failed:
        print(f"learning_curves: {message}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
