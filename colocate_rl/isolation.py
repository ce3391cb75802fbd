"""The engine's private view of the process: the only place in this package that patches anything.

vLLM expects to own its process. Here it shares one with a training rank, so every entry into an engine (build,
generate, sync, cache reset, sleep, close, interpreter exit) goes through :meth:`PrivateProcess.entered`. Inside, the
process looks like a world of its own; afterwards everything is as before, also after an exception:

========================  =============================================================================================
what                      why
========================  =============================================================================================
``torch.distributed``     vLLM makes process groups. In the trainer's world, ranks without an engine would have to join
                          each of them, and the group counter of host ranks would run ahead of the others'.
environment               Launcher variables would make vLLM join the launcher's store as a client and wait for ever.
current CUDA device       Triton launches on the current device, whatever device its tensors are on.
random state              vLLM seeds the global generators. The engine keeps a stream of its own between entries;
                          otherwise each call would sample from the same restored state.
threads, CPU affinity     vLLM's CPU backend binds the process to cores, sets one thread and disables
                          ``torch.set_num_threads``.
logging, signals, hooks,  Root handlers, signal handlers, ``sys.excepthook`` (each new default group wraps it), default
torch defaults            dtype, matmul precision, frozen garbage-collector objects.
========================  =============================================================================================
"""

import contextlib
import gc
import itertools
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed.distributed_c10d as c10d
from torch._C import _distributed_c10d as native

_C10D_STATE = (
    "_world",
    "_pg_map",
    "_pg_names",
    "_pg_group_ranks",
    "_pg_backend_config",
    "_group_count",
    "_tags_to_pg",
    "_pg_to_tag",
    "_backend",
    "_default_pg_init_method",
)
_LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
)
# Group names are counters and live in a process-wide native registry: each private world counts in a range of its own.
_PRIVATE_GROUPS = itertools.count(1 << 20, 1 << 20)


class _Slice:
    """One kind of process state: how to read it and how to put a value back."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None], *, private: bool) -> None:
        self.read = read
        self.write = write
        self.private = private
        """True: the engine keeps its own value between entries. False: the trainer's value is only protected."""


class PrivateProcess:
    """What one engine sees of the process it lives in.

    Args:
        device: the engine's CUDA device, or None on CPU.
        environment: variables set inside only.
    """

    def __init__(self, device: torch.device | None, environment: Mapping[str, str]) -> None:
        self._device = device
        hidden = {name: None for name in os.environ if name in _LAUNCHER_VARIABLES or name.startswith("TORCHELASTIC_")}
        self._environment: dict[str, str | None] = {**hidden, **environment}
        self._private: list[Any] = [None] * len(_SLICES)
        self._c10d: dict[str, Any] = _fresh_c10d_state(next(_PRIVATE_GROUPS))
        self._inside = False

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Shows the engine its own world for the length of a ``with`` block; nested entries change nothing more."""
        if self._inside:
            yield
            return
        environment = dict(os.environ)
        outer_c10d = _read_c10d()
        outer = [piece.read() for piece in _SLICES]
        frozen = gc.get_freeze_count()
        self._inside = True
        try:
            _apply_environment(self._environment)
            _write_c10d(self._c10d)
            for piece, value in zip(_SLICES, self._private, strict=True):
                if piece.private and value is not None:
                    piece.write(value)
            with torch.cuda.device(self._device) if self._device is not None else contextlib.nullcontext():
                yield
        finally:
            self._private = [piece.read() if piece.private else None for piece in _SLICES]
            self._c10d = _read_c10d()
            self._environment = _difference(environment, dict(os.environ))
            _apply_environment(_difference(dict(os.environ), environment))
            _write_c10d(outer_c10d)
            _restore_native_state()
            for piece, value in zip(_SLICES, outer, strict=True):
                piece.write(value)
            if gc.get_freeze_count() and not frozen:
                gc.unfreeze()  # vLLM freezes the whole heap, the trainer's garbage included
            self._inside = False


class _PrivateWorld(c10d._World):
    """A world whose groups are counted from ``first``, also after a destroyed default group starts the count again."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self._first = first

    @property
    def group_count(self) -> int:
        return int(c10d._group_count)

    @group_count.setter
    def group_count(self, value: int) -> None:
        c10d._group_count = max(value, self._first)


def _fresh_c10d_state(first_group: int) -> dict[str, Any]:
    state: dict[str, Any] = {name: {} for name in _C10D_STATE}
    state |= {"_world": _PrivateWorld(first_group), "_group_count": first_group}
    state |= {"_backend": None, "_default_pg_init_method": None}
    return state


def _read_c10d() -> dict[str, Any]:
    return {name: getattr(c10d, name) for name in _C10D_STATE}


def _write_c10d(state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        setattr(c10d, name, value)


def _restore_native_state() -> None:
    """Puts back what torch keeps outside of Python: the registry of group names, and the rank that log lines carry."""
    for group, name in c10d._world.pg_names.items():
        try:
            native._resolve_process_group(name)
        except RuntimeError:  # destroying a private default group empties the whole registry
            native._register_process_group(name, group)
    if c10d.is_initialized():
        native._set_global_rank(c10d.get_rank())


def _difference(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str | None]:
    """The changes that lead from one environment to another; None stands for a removed variable."""
    names = old.keys() | new.keys()
    return {name: new.get(name) for name in sorted(names) if old.get(name) != new.get(name)}


def _apply_environment(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _read_random() -> tuple[Any, Any, torch.Tensor, list[torch.Tensor] | None]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def _write_random(state: tuple[Any, Any, torch.Tensor, list[torch.Tensor] | None]) -> None:
    python, numpy, cpu, cuda = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)


def _read_affinity() -> frozenset[int] | None:
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def _write_affinity(cores: frozenset[int] | None) -> None:
    if cores is not None and cores != _read_affinity():
        os.sched_setaffinity(0, cores)


_set_num_threads = torch.set_num_threads  # vLLM's CPU worker replaces the public one by a function that does nothing


def _write_threads(count: int) -> None:
    torch.set_num_threads = _set_num_threads
    if count != torch.get_num_threads():
        _set_num_threads(count)


def _read_logging() -> tuple[int, list[logging.Handler], int]:
    return logging.root.level, list(logging.root.handlers), logging.root.manager.disable


def _write_logging(state: tuple[int, list[logging.Handler], int]) -> None:
    logging.root.setLevel(state[0])
    logging.root.handlers[:] = state[1]
    logging.disable(state[2])


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def _read_signals() -> tuple[Any, ...]:
    return tuple(signal.getsignal(number) for number in _SIGNALS)


def _write_signals(handlers: tuple[Any, ...]) -> None:
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may set handlers, and vLLM can have set none from here either
    for number, handler in zip(_SIGNALS, handlers, strict=True):
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


_SLICES = (
    _Slice(_read_random, _write_random, private=True),
    _Slice(torch.get_num_threads, _write_threads, private=True),
    _Slice(_read_affinity, _write_affinity, private=True),
    _Slice(_read_logging, _write_logging, private=False),
    _Slice(_read_signals, _write_signals, private=False),
    _Slice(lambda: sys.excepthook, lambda hook: setattr(sys, "excepthook", hook), private=False),
    _Slice(torch.get_default_dtype, torch.set_default_dtype, private=False),
    _Slice(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, private=False),
)
