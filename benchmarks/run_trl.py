"""The peer: TRL 1.16 with a vLLM server or with colocated engines, on the same work; started by compare_splits.py.

Without --worker this process starts what the mode needs (the server on the last GPU, the trainer on the others), waits,
and ends all of it. By hand, on 2 GPUs:
    python -m benchmarks.run_trl --mode server --work work.json --model FOLDER --output OUT --num-devices 2
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.processes import (
    MemoryWatch,
    RunError,
    child_environment,
    free_port,
    last_error,
    launch_command,
    run,
    started,
    visible_devices,
)
from benchmarks.work import Work, even_ids, make_dataset
from benchmarks.worker import (
    errors_into,
    first_error,
    joined_memory,
    own_memory,
    shared_settings,
    versions,
    write_result,
)

MODULE = "benchmarks.run_trl"
HOST = "127.0.0.1"


def parse() -> argparse.Namespace:
    """The arguments of launching process and worker alike."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("server", "colocate"), required=True)
    parser.add_argument("--work", type=Path, required=True, help="file written by Work.save")
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-devices", type=int, required=True)
    parser.add_argument("--vllm-memory", type=float, help="default: 0.9 for the server, 0.3 colocated")
    parser.add_argument("--settings", default="{}", help="JSON: further trl.GRPOConfig settings; they win")
    parser.add_argument("--server-timeout", type=float, default=300.0, help="seconds until the server must answer")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds until training must have ended")
    parser.add_argument("--server-port", type=int, help="of a server that runs already (worker)")
    parser.add_argument("--worker", action="store_true", help="this is a rank of the trainer")
    return parser.parse_args()


# The launching process


def check_installed() -> None:
    """Refuses to start without the peer.

    Raises:
        RunError: naming what cannot be imported.
    """
    missing = [name for name in ("trl", "vllm", "requests") if find_spec(name) is None]
    if missing:
        raise RunError(
            f"The peer needs {', '.join(missing)}, which {sys.executable} cannot import. Install trl[vllm]==1.16.0, or "
            "leave out --peer."
        )


def server_command(model: Path, work: Work, port: int, memory: float) -> list[str]:
    """vLLM's own server as ``trl vllm-serve`` of TRL 1.16 starts it (trl/scripts/vllm_serve.py, build_command)."""
    values = {
        "--host": HOST,
        "--port": port,
        "--tensor-parallel-size": 1,
        "--gpu-memory-utilization": memory,
        "--dtype": "bfloat16",
        "--max-model-len": work.window,
        "--uvicorn-log-level": "warning",
        "--weight-transfer-config": json.dumps({"backend": "nccl"}),
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": -1,
    }
    words = [str(word) for pair in values.items() for word in pair]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *words]


def wait_for_health(process: subprocess.Popen[bytes], port: int, timeout_s: float, log: Path) -> None:
    """Returns once the server answers.

    Raises:
        RunError: when it ends, or does not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RunError(f"vllm serve ended with status {process.returncode}: {last_error(log)} (log: {log})")
        try:
            with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(1)
    raise RunError(f"vllm serve did not answer within {timeout_s:.0f} s (--server-timeout). Log: {log}")


def supervise(arguments: argparse.Namespace) -> None:
    """Runs one mode from start to end."""
    check_installed()
    devices = visible_devices(arguments.num_devices)
    if arguments.mode == "colocate":
        train(arguments, devices, [])
        return
    if len(devices) < 2:
        raise RunError(f"The server mode needs at least 2 GPUs, one of them for the server; {len(devices)} given.")
    port, log = free_port(), arguments.output / "server.log"
    environment = child_environment(CUDA_VISIBLE_DEVICES=devices[-1], VLLM_SERVER_DEV_MODE="1")
    command = server_command(arguments.model, Work.load(arguments.work), port, arguments.vllm_memory or 0.9)
    with started(command, log, environment) as server:
        wait_for_health(server, port, arguments.server_timeout, log)
        train(arguments, devices[:-1], ["--server-port", str(port)])


def train(arguments: argparse.Namespace, devices: list[str], more: list[str]) -> None:
    """Launches the trainer's ranks on ``devices`` and waits for them."""
    words = ["--worker", "--mode", arguments.mode, "--work", str(arguments.work), "--model", str(arguments.model)]
    words += ["--output", str(arguments.output), "--num-devices", str(arguments.num_devices)]
    words += ["--settings", arguments.settings, *more]
    if arguments.vllm_memory is not None:
        words += ["--vllm-memory", str(arguments.vllm_memory)]
    environment = child_environment(CUDA_VISIBLE_DEVICES=",".join(devices))
    command = launch_command(MODULE, words, len(devices), on_gpu=True)
    try:
        run(command, arguments.output / "trainer.log", environment, arguments.timeout)
    except RunError as error:
        raise RunError(first_error(arguments.output) or str(error)) from None


# A rank of the trainer


def settings(arguments: argparse.Namespace, work: Work, num_ranks: int) -> dict[str, Any]:
    """Keyword arguments of ``trl.GRPOConfig`` for this work."""
    engine: dict[str, Any] = {"vllm_mode": arguments.mode}
    if arguments.mode == "server":
        engine |= {"vllm_server_host": HOST, "vllm_server_port": arguments.server_port, "vllm_group_port": free_port()}
    else:
        engine |= {"vllm_gpu_memory_utilization": arguments.vllm_memory or 0.3}
    return {
        **shared_settings(work, arguments.output, num_ranks),
        "use_vllm": True,
        **engine,
        "bf16": True,
        **json.loads(arguments.settings),
    }


class Stopwatch:
    """Seconds per optimizer step and in named calls within it, from outside TRL.

    TRL's own ``step_time`` leaves out the optimizer; this one runs from the start of a step to its end, device work
    included, like this library's.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._start = 0.0
        self._spent: dict[str, float] = {}
        self.steps: list[dict[str, float]] = []

    def hook(self, owner: Any, method: str, name: str) -> None:
        """Replaces ``owner.method`` by one that is timed as ``name``."""
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._synchronize()
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._synchronize()
                self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - start

        setattr(owner, method, timed)

    def begin(self) -> None:
        """Starts a step."""
        self._synchronize()
        self._spent, self._start = {}, time.perf_counter()

    def finish(self) -> None:
        """Ends it; training is what the named calls leave."""
        self._synchronize()
        total = time.perf_counter() - self._start
        parts = {name: self._spent.get(name, 0.0) for name in ("generate_s", "score_s", "sync_s")}
        self.steps.append({"step_s": total, **parts, "train_s": total - sum(parts.values())})


def idle(mode: str, step: dict[str, float]) -> dict[str, float | None]:
    """Share of a step in which each side of a split has nothing to do; colocated GPUs are one side."""
    if mode == "colocate":
        return {"idle_train": None, "idle_generate": None}
    total = step["step_s"]
    busy = step["generate_s"] + step["sync_s"]
    return {"idle_train": 1 - step["train_s"] / total, "idle_generate": max(0.0, 1 - busy / total)}


def work_on(arguments: argparse.Namespace) -> None:
    """Trains the asked steps; rank 0 writes the result."""
    rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    readings = MemoryWatch(arguments.output / "nvidia_smi.csv", enabled=rank == 0)
    with errors_into(arguments.output, rank), readings as watch:
        check_installed()
        work = Work.load(arguments.work)
        import torch
        from accelerate.utils import gather_object
        from transformers import AutoTokenizer, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        class Steps(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                clock.begin()

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                clock.finish()

        clock = Stopwatch(torch.cuda.synchronize if torch.cuda.is_available() else lambda: None)
        args = GRPOConfig(**settings(arguments, work, num_ranks))
        tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
        trainer = GRPOTrainer(
            model=str(arguments.model),
            reward_funcs=even_ids,
            args=args,
            train_dataset=make_dataset(work, tokenizer),
            processing_class=tokenizer,
            callbacks=[Steps()],
        )
        clock.hook(trainer.vllm_generation, "generate", "generate_s")
        clock.hook(trainer.vllm_generation, "sync_weights", "sync_s")
        clock.hook(trainer, "_calculate_rewards", "score_s")
        trainer.train()
        parts = gather_object([own_memory()])
        if rank == 0:
            logged = [logs for logs in trainer.state.log_history if "step_time" in logs]
            records = [
                {
                    "step": logs["step"],
                    **step,
                    **idle(arguments.mode, step),
                    "logprob_gap": logs.get("sampling/sampling_logp_difference/mean"),
                    "trl_step_time": logs["step_time"],
                    "sampled_tokens": logs["completions/mean_length"] * work.completions,
                }
                for logs, step in zip(logged, clock.steps, strict=True)
            ]
            write_result(
                arguments.output,
                records=records,
                num_ranks=num_ranks,
                micro_batch=args.per_device_train_batch_size,
                micro_batches=args.gradient_accumulation_steps,
                memory=joined_memory(parts, watch.peaks_gib()),
                versions=versions(),
            )


def main() -> None:
    """Launching process or worker, as the arguments say; exits with status 1 and one message when it fails."""
    arguments = parse()
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.worker:
        work_on(arguments)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is ended too
    try:
        with errors_into(arguments.output, 0):
            supervise(arguments)
    except RunError as error:
        raise SystemExit(f"benchmarks: error: {error}") from None


if __name__ == "__main__":
    main()
