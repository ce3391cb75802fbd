"""Starting, watching and ending the processes that are measured, and how much memory every device had in use."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parent.parent
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class RunError(RuntimeError):
    """A measured process failed; the message says how and where its log is."""


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment without a launcher's traces, with the repository importable."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    paths = [str(REPOSITORY), *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", **changes}


def visible_devices(count: int) -> list[str]:
    """Names of the first ``count`` visible GPUs, as CUDA_VISIBLE_DEVICES takes them."""
    named = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    devices = named or [str(number) for number in range(count)]
    if len(devices) < count:
        raise RunError(f"{count} GPUs are asked for, but CUDA_VISIBLE_DEVICES names {len(devices)}.")
    return devices[:count]


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch_command(module: str, arguments: Sequence[str], num_ranks: int, *, on_gpu: bool) -> list[str]:
    """The command that starts ``module`` once per rank: ``accelerate launch`` on GPUs, torchrun on CPU."""
    if not on_gpu:
        launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
        return [sys.executable, "-m", *launcher, "-m", module, *arguments]
    launcher = ["accelerate.commands.launch", "--num_processes", str(num_ranks), "--num_machines", "1"]
    launcher += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", str(free_port())]
    if num_ranks > 1:
        launcher.append("--multi_gpu")
    return [sys.executable, "-m", *launcher, "-m", module, *arguments]


@contextlib.contextmanager
def started(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command in a process group of its own, output into ``log``; at the end nothing of it is left."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        output.write(f"$ {' '.join(command)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            yield process
        finally:
            end(process)


def end(process: subprocess.Popen[bytes], patience_s: float = 20.0) -> None:
    """Ends a process and all its descendants, also those in process groups of their own."""
    family = _descendants(process.pid)
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sign)
        if sign == signal.SIGKILL:
            for member in family:
                with contextlib.suppress(psutil.Error):
                    member.kill()
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            family = [member for member in family if _alive(member)]
            if process.poll() is not None and not family:
                return
            time.sleep(0.1)


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def run(command: Sequence[str], log: Path, environment: Mapping[str, str], timeout_s: float) -> None:
    """Runs a command to its end.

    Raises:
        RunError: when it fails or takes longer than ``timeout_s``; with the last error line of its log.
    """
    with started(command, log, environment) as process:
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise RunError(f"Not finished after {timeout_s:.0f} s (--timeout). Log: {log}") from None
    if status != 0:
        raise RunError(f"{last_error(log)} (exit status {status}, log: {log})")


def last_error(log: Path) -> str:
    """The line of a log that says best what went wrong."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    said = [line.strip() for line in lines if "colocate_rl: error:" in line]
    raised = [line.strip() for line in lines if _names_error(line)]
    useful = said or [line for line in raised if "ChildFailedError" not in line and "PeerError" not in line] or raised
    return (useful or [line for line in lines if line.strip()] or ["no output"])[-1][:500]


def _names_error(line: str) -> bool:
    start = line.strip().removeprefix("[rank0]: ").split(":")[0].split(" ")[0]
    return ":" in line and start.endswith(("Error", "Exception"))


class MemoryWatch:
    """Largest memory in use on every GPU (all processes together), as ``nvidia-smi`` reports it four times a second.

    A child process does the looking, so that the measured one is not disturbed. Without ``nvidia-smi`` there are none.

    Args:
        log: file for the readings.
        enabled: False: look at nothing (on ranks other than 0).
    """

    def __init__(self, log: Path, *, enabled: bool = True) -> None:
        self._log = log
        self._enabled = enabled
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "MemoryWatch":
        if self._enabled and shutil.which("nvidia-smi") is not None:
            query = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits", "-lms", "250"]
            with self._log.open("wb") as output:
                self._process = subprocess.Popen(query, stdout=output, stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            if self._process.poll() is None:
                self._process.kill()

    def peaks_gib(self) -> dict[str, float]:
        """Peak of each device by its number, in GiB."""
        peaks: dict[str, float] = {}
        for line in self._log.read_text().splitlines() if self._log.exists() else []:
            parts = line.split(",")
            if len(parts) == 2 and parts[1].strip().isdigit():
                device = parts[0].strip()
                peaks[device] = max(peaks.get(device, 0.0), int(parts[1]) / 1024)
        return peaks
