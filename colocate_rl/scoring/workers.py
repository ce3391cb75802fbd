"""Reward workers: a few processes per rank, each of which calls one function at a time and may be killed for it.

``multiprocessing`` is not used because its workers would be forks of a process with CUDA and an engine in it, or would
run the user's script once more to find what it defines. Workers start as fresh interpreters that import nothing heavy;
functions reach them by cloudpickle, so that those defined in a script or a notebook work too.
"""

import concurrent.futures
import contextlib
import pickle
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

import cloudpickle
import psutil

from colocate_rl.errors import ConfigError, RewardError
from colocate_rl.lifeline import child_environment
from colocate_rl.scoring.contract import RewardFunction
from colocate_rl.scoring.worker import Answer, CallFailure

START_S = 120.0
"""Seconds a worker may take to start and import what the functions need."""
POLL_S = 0.01
"""Seconds between two looks at calls that shall end."""
END_S = 30.0
"""Seconds a worker may take to end once its pipe is closed."""


def pickled(name: str, function: RewardFunction) -> bytes:
    """A function on its way to a worker.

    Raises:
        ConfigError: when it cannot be sent, with the reason.
    """
    try:
        blob: bytes = cloudpickle.dumps(function)
    except Exception as error:
        raise ConfigError(
            f"Reward function {name!r} cannot be sent to a worker process: {error}. Let it make what cannot be copied "
            "(locks, open files, connections) on its first call instead of holding it, or set reward_num_workers=0."
        ) from error
    return blob


class _Worker:
    """One process, made anew after it was killed or died."""

    def __init__(self, functions: Sequence[bytes]) -> None:
        self._functions = functions
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any] | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, None when there is none."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Starts the process and gives it the functions.

        Raises:
            RewardError: when it does not come up, or cannot take a function.
        """
        mine, theirs = Pipe()
        environment = {"OMP_NUM_THREADS": "1", **child_environment()}  # one thread each: there are many workers
        command = [sys.executable, "-m", "colocate_rl.scoring.worker", str(theirs.fileno())]
        self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._pipe = mine
        theirs.close()
        answer = self._ask("load", self._functions, START_S)
        if isinstance(answer, CallFailure):
            self.kill()
            raise RewardError(
                f"A reward worker could not take over the reward functions: {answer.reason}. They must be importable, "
                f"or defined in the script itself; else set reward_num_workers=0.\n{answer.trace}"
            )

    def call(self, number: int, arguments: dict[str, Any], timeout_s: float | None) -> Answer | CallFailure:
        """Calls a function; a call that takes too long, or kills its process, costs this worker only."""
        if self._process is None or self._process.poll() is not None:
            self.kill()
            self.start()
        answer = self._ask("call", (number, arguments), timeout_s)
        assert isinstance(answer, Answer | CallFailure)
        return answer

    def _ask(self, name: str, arguments: Sequence[Any], timeout_s: float | None) -> Any:
        assert self._process is not None
        assert self._pipe is not None
        message = pickle.dumps((name, tuple(arguments)))  # not by send(), which would share tensors' memory
        try:
            self._pipe.send_bytes(message)
            if not self._pipe.poll(timeout_s):
                self.kill()
                return CallFailure(f"took longer than {timeout_s:g} s")
            return pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
            status = self._process.poll()
            self.kill()
            how = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
            perhaps = "; the kernel does that when memory runs out" if status == -signal.SIGKILL else ""
            return CallFailure(f"its worker process ended ({how}{perhaps})")

    def interrupt(self) -> None:
        """Ends the process and whatever it started; a call under way in another thread then has failed."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        process.kill()
        process.wait()  # or the next call might still take it for alive

    def kill(self) -> None:
        """Ends the process and forgets it; the next call starts another."""
        if self._process is None or self._pipe is None:
            return
        self.interrupt()
        self._process.wait()
        self._pipe.close()
        self._process = self._pipe = None


class WorkerPool:
    """Calls functions in worker processes; every worker has a thread of the rank that waits for it.

    Args:
        functions: as :func:`pickled` makes them; calls name them by position.
        num_workers: processes.
        timeout_s: most seconds for one call; None: no limit.
    """

    def __init__(self, functions: Sequence[bytes], num_workers: int, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._workers = [_Worker(functions) for _ in range(num_workers)]
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._threads = concurrent.futures.ThreadPoolExecutor(num_workers, thread_name_prefix="colocate_rl rewards")
        for worker in self._workers:
            self._free.put(worker)

    def start(self) -> None:
        """Starts all workers now, so that a function they cannot take over is an error at once.

        Raises:
            RewardError: when a worker does not come up.
        """
        try:
            # In the threads that will wait for them: the kernel ends a child when the thread that started it ends.
            list(self._threads.map(_Worker.start, self._workers))
        except BaseException:
            self.close()
            raise

    def submit(self, number: int, arguments: dict[str, Any]) -> "concurrent.futures.Future[Answer | CallFailure]":
        """Asks for one call."""
        return self._threads.submit(self._call, number, arguments)

    def _call(self, number: int, arguments: dict[str, Any]) -> Answer | CallFailure:
        worker = self._free.get()
        try:
            return worker.call(number, arguments, self._timeout_s)
        finally:
            self._free.put(worker)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    def interrupt(self) -> None:
        """Ends the calls that are under way: they count as failed, and their workers are made anew when needed."""
        for worker in self._workers:
            worker.interrupt()

    def close(self) -> None:
        """Ends all workers; may be called twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._free.qsize() < len(self._workers):  # a call may be starting its worker anew just now
            self.interrupt()
            time.sleep(POLL_S)
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.kill()
