"""Reward functions that run in the rank itself: plain ones one after the other, coroutine functions all at once."""

import asyncio
import concurrent.futures
import functools
import inspect
import threading
from collections.abc import Coroutine
from typing import Any

from colocate_rl.errors import RewardError
from colocate_rl.scoring.contract import (
    OnDemand,
    RewardFunction,
    RewardOptions,
    RewardRequest,
    Scores,
    all_failed,
    checked_values,
)


class FunctionSource:
    """A function that is called in the rank, with all of its completions at once.

    Args:
        name: for logs and messages.
        function: see :class:`colocate_rl.rollout.rewards.Rewards`.
        options: only ``on_error`` matters here.
    """

    def __init__(self, name: str, function: RewardFunction, options: RewardOptions) -> None:
        self.name = name
        self._function = function
        self._options = options

    in_background = False

    def begin(self, request: RewardRequest) -> OnDemand:
        """See :class:`colocate_rl.scoring.contract.RewardSource`."""
        return OnDemand(functools.partial(self._score, request))

    def _score(self, request: RewardRequest) -> Scores:
        try:
            values = self._function(**request.arguments())
        except Exception as error:
            return failed(self.name, error, self._options, len(request))
        return Scores(checked_values(self.name, values, len(request)))


def failed(name: str, error: Exception, options: RewardOptions, num_rows: int) -> Scores:
    """What becomes of an error inside a function: no reward for its rows, or the error with the function's name."""
    if options.on_error == "none":
        return all_failed(num_rows, f"{type(error).__name__}: {error}")
    error.add_note(f"It was raised by the reward function {name!r}.")
    raise error


class EventLoop:
    """An event loop in a daemon thread: it runs beside any loop of the caller's own, as in a notebook."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="colocate_rl rewards", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> "concurrent.futures.Future[Any]":
        """Runs a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancels what still runs and stops the loop; may be called twice."""
        if not self._loop.is_closed():
            self.submit(_cancel_others()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class AsyncSource:
    """A coroutine function; all of them wait for their answers at the same time.

    Args:
        name: for logs and messages.
        function: a coroutine function, or an object whose ``__call__`` is one.
        options: ``on_error`` and ``timeout_s``, which cancels the coroutine.
        loop: where it runs, shared by all coroutine functions.
    """

    def __init__(self, name: str, function: RewardFunction, options: RewardOptions, loop: EventLoop) -> None:
        self.name = name
        self._function = function
        self._options = options
        self._loop = loop

    in_background = True

    def begin(self, request: RewardRequest) -> "_Waiting":
        """See :class:`colocate_rl.scoring.contract.RewardSource`."""

        async def call() -> Any:
            async with asyncio.timeout(self._options.timeout_s) as limit:
                try:
                    return await self._function(**request.arguments())
                except TimeoutError as error:
                    if limit.expired():
                        raise
                    raise _OwnTimeoutError(error) from error

        return _Waiting(self.name, self._loop.submit(call()), self._options, len(request))


class _OwnTimeoutError(Exception):
    """A TimeoutError of the function's own, apart from the run's limit."""


class _Waiting:
    def __init__(
        self, name: str, future: "concurrent.futures.Future[Any]", options: RewardOptions, num_rows: int
    ) -> None:
        self._name, self._future, self._options, self._num_rows = name, future, options, num_rows

    def result(self) -> Scores:
        try:
            values = self._future.result()
        except TimeoutError:
            reason = f"took longer than reward_timeout_s={self._options.timeout_s:g}"
            if self._options.on_error == "none":
                return all_failed(self._num_rows, reason)
            raise RewardError(
                f"Reward function {self._name!r} {reason} for {self._num_rows} completions. Raise the limit, or set "
                "on_reward_error='none' to go on without its rewards."
            ) from None
        except _OwnTimeoutError as wrapped:
            return failed(self._name, wrapped.args[0], self._options, self._num_rows)
        except Exception as error:
            return failed(self._name, error, self._options, self._num_rows)
        return Scores(checked_values(self._name, values, self._num_rows))

    def cancel(self) -> None:
        self._future.cancel()


def is_async(function: Any) -> bool:
    """True for a coroutine function, also inside ``functools.partial`` or as an object's ``__call__``."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
