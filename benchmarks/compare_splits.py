"""Which split of the GPUs is fastest? Runs the same work once per number of engines K, and prints one table.

    python benchmarks/compare_splits.py --num-vllm-gpus 1 2 --model qwen2-1.5b              # on 4 or more GPUs
    python benchmarks/compare_splits.py --num-vllm-gpus 1 2 --shared-devices --peer trl-server trl-colocate   # on 2
    python benchmarks/compare_splits.py --num-vllm-gpus 1 2 --model tiny --num-processes 2 --prompts 8 \\
        --generations 4 --prompt-tokens 16 --new-tokens 16 --steps 4 --warmup-steps 2       # on CPU

Writes results.json, splits.png, timeline-NAME.png (each run's last steps), and everything each run printed, into
--output.
"""

import argparse
import json
import os
import platform
import shlex
import shutil
import signal
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import timeline
from benchmarks.planning import Plan, can_be_fitted
from benchmarks.processes import RunError, child_environment, launch_command, run, visible_devices
from benchmarks.results import Row, draw, print_results
from benchmarks.run_ours import MODULE as OURS
from benchmarks.run_trl import MODULE as TRL
from benchmarks.work import SHAPES, Work, WorkError, add_work_arguments, model_folder, work_from, write_json
from benchmarks.worker import RESULT, TIMES, first_error, medians

PEERS = {"trl-server": "server", "trl-colocate": "colocate"}
SHARED_MEMORY = 0.3
DRAWN_STEPS = 3


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--num-vllm-gpus", type=int, nargs="*", default=[1], metavar="K", help="numbers of engines (default: 1)")
    add("--devices", type=int, metavar="N", help="GPUs to use (default: all that are visible)")
    add("--num-processes", type=int, metavar="W", help="training ranks (default: N-K; on CPU 2)")
    add(
        "--overlap",
        nargs="+",
        default=["none"],
        choices=["none", "stream", "one_step"],
        help="modes in which each split runs (default: none)",
    )
    add("--shared-devices", action="store_true", help="where N-K < K: N ranks, engines on the training GPUs")
    add("--vllm-memory", type=float, help=f"memory share of the engines (default: 0.9; {SHARED_MEMORY} where shared)")
    add("--settings", default="{}", metavar="JSON", help="further colocate_rl.GRPOConfig settings")
    add("--peer", nargs="*", default=[], choices=PEERS, help="run TRL on the same work too")
    add("--peer-memory", type=float, help="memory share of TRL's engines (default: 0.9 server, 0.3 colocated)")
    add("--peer-settings", default="{}", metavar="JSON", help="further trl.GRPOConfig settings")
    add("--plan-for", type=int, metavar="N", help="advise for N devices (default: those used)")
    add("--timeout", type=float, default=900.0, metavar="S", help="seconds a run may take (default: 900)")
    add("--keep", action="store_true", help="keep the other rows that --output holds of the same work")
    add("--output", type=Path, default=Path("runs/compare_splits"), help="folder (default: runs/compare_splits)")
    add("--models", type=Path, default=Path("runs/models"), help="where made models are kept (default: runs/models)")
    add_work_arguments(parser, Work())
    return parser.parse_args(arguments)


def count_devices(asked: int | None) -> int:
    """GPUs to use; 0 on a machine without any."""
    import torch

    found = torch.cuda.device_count()
    if asked is not None and asked > found:
        raise WorkError(f"--devices {asked}, but {found} GPU(s) are visible.")
    return found if asked is None else asked


def plan_rows(options: argparse.Namespace, num_devices: int) -> list[Row]:
    """What to run: one row per split and peer, without figures yet."""
    rows = []
    for engines in options.num_vllm_gpus:
        shared = options.shared_devices and num_devices - engines < engines
        ranks = options.num_processes or (num_devices if shared else num_devices - engines)
        if not num_devices:
            ranks = options.num_processes or 2
        rows.append(
            {
                "system": "colocate_rl",
                "num_vllm_gpus": engines,
                "num_processes": ranks,
                "num_devices": num_devices or ranks,
                "splits_devices": bool(num_devices) and not shared,
            }
        )
    rows = [{**row, "overlap": overlap} for row in rows for overlap in options.overlap]
    for peer in options.peer:
        server = peer == "trl-server"
        rows.append(
            {
                "system": peer,
                "num_vllm_gpus": 1 if server else num_devices,
                "num_processes": max(0, num_devices - 1 if server else num_devices),
                "num_devices": num_devices,
                "splits_devices": False,
                "overlap": "none",
            }
        )
    return [{**row, "on_gpu": bool(num_devices), "error": None} for row in rows]


def command_for(row: Row, options: argparse.Namespace, paths: dict[str, Path]) -> list[str]:
    """The command that runs a row."""
    words = ["--work", str(paths["work"]), "--model", str(paths["model"]), "--output", str(paths["output"])]
    if row["system"] != "colocate_rl":
        words += ["--mode", PEERS[row["system"]], "--num-devices", str(row["num_devices"])]
        words += ["--settings", options.peer_settings, "--timeout", str(options.timeout)]
        words += [] if options.peer_memory is None else ["--vllm-memory", str(options.peer_memory)]
        return [sys.executable, "-m", TRL, *words]
    memory = options.vllm_memory
    if row["on_gpu"] and not row["splits_devices"]:
        last = row["num_devices"] - 1
        words += ["--vllm-devices", ",".join(str(last - engine) for engine in range(row["num_vllm_gpus"]))]
        memory = SHARED_MEMORY if memory is None else memory
    words += [] if memory is None else ["--vllm-memory", str(memory)]
    settings = json.dumps({"overlap": row["overlap"], **json.loads(options.settings)})
    words += ["--num-vllm-gpus", str(row["num_vllm_gpus"]), "--settings", settings]
    return launch_command(OURS, words, row["num_processes"], on_gpu=row["on_gpu"])


def measure(row: Row, work: Work, options: argparse.Namespace, paths: dict[str, Path]) -> Row:
    """Runs a row and adds its figures, or the message of what went wrong."""
    folder = paths["output"]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    is_peer = row["system"] != "colocate_rl"
    environment = child_environment()
    if row["on_gpu"] and not is_peer:
        environment |= hide_devices(row["num_devices"])
    extra = 600.0 if is_peer else 0.0  # the peer's launching process keeps to the limit itself and ends its server
    try:
        if is_peer and not row["on_gpu"]:
            raise RunError("TRL's engines need GPUs.")
        work.rows(row["num_processes"])
        run(command_for(row, options, paths), folder / "output.log", environment, options.timeout + extra)
        result = json.loads((folder / RESULT).read_text())
        return {**row, **figures(result, work, row["num_devices"])}
    except (RunError, WorkError, OSError, ValueError) as error:
        return {**row, "error": first_error(folder) or str(error)}


def hide_devices(count: int) -> dict[str, str]:
    """Leaves only the first ``count`` visible GPUs to a child."""
    import torch

    if count == torch.cuda.device_count():
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible_devices(count))}


def figures(result: dict[str, Any], work: Work, num_devices: int) -> dict[str, Any]:
    """Medians over the counted steps, and what follows from them."""
    counted = [record for record in result["records"] if record["step"] > work.warmup_steps]
    middle = medians(counted, [*TIMES, "idle_train", "idle_generate", "overlap_efficiency", "logprob_gap"])
    step, generate, train = middle["step_s"], middle["generate_s"], middle["train_s"]
    assert step is not None
    assert generate is not None
    assert train is not None
    for record in counted:
        if not work.mean_tokens and round(record["sampled_tokens"]) != work.new_tokens_per_step:
            raise WorkError(
                f"Step {record['step']} sampled {record['sampled_tokens']} of {work.new_tokens_per_step} tokens."
            )
    sampled = statistics.median(record["sampled_tokens"] for record in counted)
    return {
        **middle,
        "sampled_tokens": sampled,
        "tokens_per_s": sampled / generating_seconds(counted, generate),
        "train_tokens_per_s": (work.prompt_tokens_per_step + sampled) / train,
        "samples_per_s_per_gpu": work.completions / step / num_devices,
        "step_s_range": [min(record["step_s"] for record in counted), max(record["step_s"] for record in counted)],
        "micro_batch": result["micro_batch"],
        "micro_batches": result["micro_batches"],
        "memory": result["memory"],
        "versions": result["versions"],
        "records": result["records"],
    }


def generating_seconds(records: list[dict[str, Any]], generate_s: float) -> float:
    """Seconds in which engines generated: more than the ranks waited (``generate_s``) where the two overlap."""
    longest = [max(record["engine_generate_s"]) for record in records if record.get("engine_generate_s")]
    return statistics.median(longest) if longest else generate_s


def describe_machine(num_devices: int) -> dict[str, Any]:
    """What the numbers were measured on."""
    import torch

    return {
        "devices": [torch.cuda.get_device_name(number) for number in range(num_devices)],
        "num_devices": num_devices,
        "cpu_count": os.cpu_count(),
        "platform": platform.platform(),
    }


def describe_work(work: Work) -> str:
    """The work in one line."""
    counted = work.steps - work.warmup_steps
    lengths = f"up to {work.new_tokens} (about {work.mean_tokens})" if work.mean_tokens else str(work.new_tokens)
    return (
        f"{work.model} ({work.dtype} weights): {work.prompts} prompts x {work.generations} completions, "
        f"{work.prompt_tokens} + {lengths} tokens; {counted} of {work.steps} steps counted"
    )


def prepare_model(work: Work, options: argparse.Namespace, output: Path) -> Path:
    """The model folder, made first where a shape is asked for."""
    folder = model_folder(work, options.models)
    if work.model in SHAPES and not (folder / "config.json").is_file():
        print(f"Making a {work.model} model with random weights in {folder} ...", flush=True)
        command = [sys.executable, "-m", "benchmarks.work", work.model, str(folder), "--seed", str(work.seed)]
        run(command, output / "model.log", child_environment(), options.timeout)
    return folder


def kept_rows(path: Path, results: dict[str, Any], planned: set[str]) -> list[Row]:
    """Rows of an earlier call on the same machine and work, without those that are measured again."""
    if not path.is_file():
        return []
    earlier = json.loads(path.read_text())
    same_work = Work(**earlier["work"]) == Work(**results["work"])  # a file may be older than the newest field
    if earlier["machine"] != results["machine"] or not same_work:
        raise WorkError(f"--keep: {path} holds another machine's or another work's figures. Choose another --output.")
    results["versions"] |= earlier["versions"]
    return [row for row in earlier["rows"] if name_of(row) not in planned]


def name_of(row: Row) -> str:
    """Folder name of a row."""
    overlap = "" if row["overlap"] == "none" else f"-{row['overlap']}"
    return f"{row['system']}-k{row['num_vllm_gpus']}-w{row['num_processes']}{overlap}"


def main(arguments: list[str] | None = None) -> int:
    """Runs everything; returns 1 only when nothing could be measured."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the runs are ended too
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    try:
        work = work_from(options)
        if work.model == "tiny":
            work = replace(work, dtype="float32")  # tiny is for machines without a GPU
        num_devices = count_devices(options.devices)
        planned = plan_rows(options, num_devices)
        results: dict[str, Any] = {
            "machine": describe_machine(num_devices),
            "versions": {},
            "command": shlex.join([sys.executable, *sys.argv] if arguments is None else [__file__, *arguments]),
            "work": asdict(work),
            "rows": [],
            "plan": None,
        }
        if options.keep:
            results["rows"] = kept_rows(output / "results.json", results, {name_of(row) for row in planned})
        model = prepare_model(work, options, output)
    except (WorkError, RunError) as error:
        print(f"benchmarks: error: {error}", file=sys.stderr)
        return 1
    work.save(output / "work.json")
    for row in planned:
        print(f"Running {name_of(row)} ...", flush=True)
        paths = {"work": output / "work.json", "model": model, "output": output / "runs" / name_of(row)}
        done = measure(row, work, options, paths)
        print(f"  {done['error'] or format(done['step_s'], '.3f') + ' s per step'}", flush=True)
        draw_timeline(done, paths["output"], output)
        results["versions"] |= done.pop("versions", {})
        results["rows"].append(done)
        write_json(output / "results.json", results)  # after each run, so that none is lost
    return report(results, work, options, output)


def draw_timeline(row: Row, folder: Path, output: Path) -> None:
    """Draws the last steps of a run of ours; one that failed may have left none."""
    path = folder / "run" / "timeline.jsonl"
    if row["error"] is None and path.is_file():
        title = f"{name_of(row)}: the last {DRAWN_STEPS} steps"
        timeline.draw(timeline.load(path, DRAWN_STEPS), output / f"timeline-{name_of(row)}.png", title)


def report(results: dict[str, Any], work: Work, options: argparse.Namespace, output: Path) -> int:
    """Prints and draws what was measured."""
    rows = results["rows"]
    rows.sort(key=lambda row: (row["system"] != "colocate_rl", row["system"], row["num_vllm_gpus"], row["overlap"]))
    good = [row for row in rows if row["error"] is None]
    plan, sentences = Plan.fit(rows), []
    if plan is not None:
        target = options.plan_for or max(row["num_processes"] + row["num_vllm_gpus"] for row in good)
        results["plan"] = plan.as_json(target)
        sentences = plan.sentences(target, len({row["num_vllm_gpus"] for row in rows if can_be_fitted(row)}))
        if not results["machine"]["num_devices"]:
            sentences.append("Ranks and engines share this machine's cores: measure on GPUs before choosing.")
    elif good:
        sentences = ["No advice on K: it needs a run of colocate_rl whose engines have GPUs of their own."]
    write_json(output / "results.json", results)
    print_results(rows, describe_work(work), sentences)
    draw(rows, output / "splits.png", describe_work(work))
    print(f"Written: {output / 'results.json'}, {output / 'splits.png'}, timelines of the runs beside them")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
