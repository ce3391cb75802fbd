"""Ranks for tests: N processes in one gloo group that stay alive between tests, as importing torch takes seconds.

``Ranks.run(function, *arguments)`` calls a module-level function on every rank and returns the results in rank order.
An exception on any rank becomes one :class:`RankError` with every rank's traceback; a rank that does not answer in time
becomes one too. After either all processes are killed, and the next ``run`` starts new ones.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist  # noqa: TID251 - the tests make the group that the package finds

STORE_TIMEOUT_S = 60.0
GRACE_S = 3.0
"""How long the other ranks may still answer once one has failed: they probably wait for it in a collective."""


class RankError(AssertionError):
    """What went wrong on the ranks, with each one's traceback."""


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception that a function on a rank was expected to raise."""

    kind: str
    message: str
    seconds: float


def outcome(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, or what it raised: for tests about failing."""
    start = time.perf_counter()
    try:
        return function(*arguments)
    except Exception as error:
        return Raised(type(error).__name__, str(error), time.perf_counter() - start)


class Ranks:
    """A gloo group of processes.

    Args:
        world_size: number of ranks.
        folder: where the group's store is written.
        environment: further variables of every rank, set before it imports torch.
    """

    def __init__(self, world_size: int, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.world_size = world_size
        self._folder = folder
        self._environment = dict(environment or {})
        self._starts = 0
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []

    @property
    def pids(self) -> list[int | None]:
        """Process ids of the ranks that run now."""
        return [process.pid for process in self._processes]

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 40.0) -> list[Any]:
        """Calls ``function(*arguments)`` on every rank.

        Returns:
            One result per rank, in rank order.

        Raises:
            RankError: when a rank raised, died or did not answer in time; all ranks are killed.
        """
        try:
            if not self._processes:
                self._start()
            call = pickle.dumps((function, arguments, timeout_s))
            for connection in self._connections:
                connection.send_bytes(call)
            return self._answers(time.monotonic() + timeout_s)
        except BaseException:
            self.kill()
            raise

    def _start(self) -> None:
        self._starts += 1
        store = self._folder / f"store-{os.getpid()}-{self._starts}"
        context = multiprocessing.get_context("spawn")
        for rank in range(self.world_size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.world_size, str(store)), daemon=True)
            with _variables({**launcher_variables(rank, self.world_size), **self._environment}):
                process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(mine)
        self._answers(time.monotonic() + STORE_TIMEOUT_S)

    def _answers(self, deadline: float) -> list[Any]:
        """Waits for one answer of every rank; a failure shortens the wait for the others."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                failures |= dict.fromkeys(waiting.values(), "no answer in time; its stack is on stderr\n")
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    failure, results[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    failure = "the process ended\n"
                if failure is not None:
                    failures[rank] = failure
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            raise RankError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
        return [results[rank] for rank in range(self.world_size)]

    def kill(self) -> None:
        """Ends all ranks at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []


def launcher_variables(rank: int, world_size: int) -> dict[str, str]:
    """What torchrun would set for a rank, and a few more settings; nobody listens on the address."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "9",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "tests",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


@contextlib.contextmanager
def _variables(changes: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for the length of a ``with`` block: a spawned process inherits them."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(connection: Connection, rank: int, world_size: int, store_path: str) -> None:
    """A rank's life: join the group, then answer calls until the other end of the pipe closes."""
    store = dist.FileStore(store_path, world_size)
    store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=STORE_TIMEOUT_S)
    )
    connection.send_bytes(pickle.dumps((None, None)))
    while True:
        try:
            call = connection.recv_bytes()
        except (EOFError, ConnectionError):
            return
        failure, result = None, None
        try:
            function, arguments, timeout_s = pickle.loads(call)
            faulthandler.dump_traceback_later(max(1.0, timeout_s - 1.0))
            result = function(*arguments)
        except BaseException:
            failure = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        try:
            answer = pickle.dumps((failure, result))
        except Exception:
            answer = pickle.dumps((traceback.format_exc(), None))
        connection.send_bytes(answer)
