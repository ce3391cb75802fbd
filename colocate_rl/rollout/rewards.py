"""Several reward sources as one table: who is asked what, in which order, and how much each counts."""

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from colocate_rl.errors import ConfigError, RewardError
from colocate_rl.scoring.contract import (
    HELPERS,
    PendingScores,
    RewardFunction,
    RewardOptions,
    RewardRequest,
    RewardSource,
    Scores,
    reward_name,
    unique_names,
)
from colocate_rl.scoring.local import AsyncSource, EventLoop, FunctionSource, is_async
from colocate_rl.scoring.models import ModelOptions, ModelSource
from colocate_rl.scoring.pooled import PooledSource
from colocate_rl.scoring.workers import WorkerPool, pickled

logger = logging.getLogger(__name__)

Reward = RewardFunction | str | nn.Module
"""A function, a coroutine function, a reward model, or the folder or hub name of one."""


class Rewards:
    """Several reward sources as one table of rewards.

    Coroutine functions and functions in workers begin first and go on while the others are called in order.

    Args:
        functions: functions, each called with keywords only: ``prompts``, ``completions``, ``completion_ids``, every
            further column, ``trainer_state``, ``log_extra``, ``log_metric``; each returns one float or None per
            completion. Or reward models, as such or by name (:class:`colocate_rl.scoring.models.ModelSource`).
        weights: one per function; None: all 1.0.
        options: workers, time limit, and what an error costs.
        processing_classes: tokenizers of reward models, one entry per function (None for others); None: their own.
        model_options: how reward models are loaded.

    Raises:
        ConfigError: when there is no function, numbers do not match, or one cannot be used as the options say.
    """

    def __init__(
        self,
        functions: Sequence[Reward],
        weights: Sequence[float] | None = None,
        *,
        options: RewardOptions | None = None,
        processing_classes: Sequence[PreTrainedTokenizerBase | None] | None = None,
        model_options: ModelOptions | None = None,
    ) -> None:
        _check(functions, weights, processing_classes)
        self.functions = list(functions)
        self.names = unique_names([reward_name(function) for function in functions])
        self.weights = torch.tensor(list(weights) if weights is not None else [1.0] * len(functions))
        self._options = options if options is not None else RewardOptions()
        self._loop: EventLoop | None = None
        self._pool: WorkerPool | None = None
        self._closed = False
        self._sources = self._make_sources(processing_classes, model_options or ModelOptions({}))

    def check_arguments(self, columns: Sequence[str], rows: str) -> None:
        """Looks, before anything is sampled, whether every function can be called with what it will be given.

        Args:
            columns: of the data set, as far as reward functions get them.
            rows: names the data set in the message.

        Raises:
            ConfigError: for the first one that cannot.
        """
        given = ["prompts", "completions", "completion_ids", *columns, *HELPERS]
        for name, function in zip(self.names, self.functions, strict=True):
            if isinstance(function, str | nn.Module):
                continue
            try:
                signature = inspect.signature(function)
            except (ValueError, TypeError):  # some builtins have none
                continue
            try:
                signature.bind(**dict.fromkeys(given))
            except TypeError as error:
                raise ConfigError(
                    f"Reward function {name!r} cannot be called: {error}. For {rows} it is given {', '.join(given)}. "
                    "Name its parameters like the data set's columns, and let **kwargs take the rest."
                ) from None

    def _make_sources(
        self, processing_classes: Sequence[PreTrainedTokenizerBase | None] | None, model_options: ModelOptions
    ) -> list[RewardSource]:
        options = self._options
        plain = [number for number, function in enumerate(self.functions) if _is_plain(function)]
        if plain and options.timeout_s is not None and not options.num_workers:
            raise ConfigError(
                f"reward_timeout_s={options.timeout_s:g} cannot end a call of reward function "
                f"{self.names[plain[0]]!r} inside the training process. Set reward_num_workers to 1 or more."
            )
        if plain and options.num_workers:
            functions = [pickled(self.names[number], self.functions[number]) for number in plain]  # type: ignore[arg-type]
            self._pool = WorkerPool(functions, options.num_workers, options.timeout_s)
        tokenizers = processing_classes if processing_classes is not None else [None] * len(self.functions)
        sources: list[RewardSource] = []
        for number, (name, function, tokenizer) in enumerate(zip(self.names, self.functions, tokenizers, strict=True)):
            if isinstance(function, str | nn.Module):
                sources.append(ModelSource(name, function, tokenizer, model_options))
            elif is_async(function):
                self._loop = self._loop if self._loop is not None else EventLoop()
                sources.append(AsyncSource(name, function, options, self._loop))
            elif self._pool is not None:
                sources.append(PooledSource(name, plain.index(number), self._pool, options))
            else:
                sources.append(FunctionSource(name, function, options))
        return sources

    def prepare(self, device: torch.device) -> None:
        """Loads reward models onto ``device`` (``functions`` then holds them) and starts the workers.

        Raises:
            RewardError: when a worker cannot take over a function.
        """
        if self._pool is not None:
            self._pool.start()
        for number, source in enumerate(self._sources):
            if isinstance(source, ModelSource):
                self.functions[number] = source.load(device)

    @property
    def processing_classes(self) -> list[PreTrainedTokenizerBase | None]:
        """The tokenizer of each reward model, None for functions."""
        return [source.tokenizer if isinstance(source, ModelSource) else None for source in self._sources]

    def score(
        self,
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        columns: Mapping[str, list[Any]],
        *,
        groups: Sequence[int] | None = None,
        **helpers: Any,
    ) -> torch.Tensor:
        """Asks every source about this rank's completions.

        Args:
            prompts: one per completion, as the data set has it.
            completions: text, or a list of messages, per completion.
            completion_ids: sampled ids per completion.
            columns: the data set's other columns, one value per completion.
            groups: which prompt each completion is of; None: each is on its own.
            helpers: trainer_state, log_extra and log_metric.

        Returns:
            float32 [n, F]; NaN where a source gave none.

        Raises:
            RewardError: for a wrong number of values, or one that is no finite number; for a call that failed in a
                worker or took too long, unless ``on_error`` is "none". What a function in this process raises is its
                own error, with a note that names the function.
        """
        table = torch.full((len(prompts), len(self.functions)), torch.nan)
        if not prompts:
            return table
        if self._closed and (self._pool is not None or self._loop is not None):
            raise RewardError(
                "The reward workers, or what coroutine functions run in, are closed: trainer.close() ended them. Call "
                "it after the last run and evaluation, or make a new trainer."
            )
        numbers = list(groups) if groups is not None else list(range(len(prompts)))
        request = RewardRequest(list(prompts), completions, completion_ids, columns, numbers, helpers)
        pending: dict[int, PendingScores] = {}
        try:
            for number, source in enumerate(self._sources):
                pending[number] = source.begin(request)
            for number in sorted(pending, key=lambda number: self._sources[number].in_background):
                scores = pending[number].result()
                table[:, number] = torch.tensor(scores.values)
                self._note_failures(self.names[number], scores, helpers.get("log_metric"))
        except BaseException:
            for answer in pending.values():
                answer.cancel()
            raise
        _warn_of_unscored(table, request)
        return table

    def _note_failures(self, name: str, scores: Scores, log_metric: Any) -> None:
        if self._options.on_error != "none":
            return
        if log_metric is not None:
            log_metric(f"reward_errors/{name}", len(scores.failures) / len(scores.values))
        if scores.failures:
            row, reason = next(iter(scores.failures.items()))
            logger.warning(
                "Reward function %r gave no reward for %d of %d completions (None: they are left out with it). "
                "Row %d: %s",
                name,
                len(scores.failures),
                len(scores.values),
                row,
                reason,
            )

    def close(self) -> None:
        """Ends workers and the event loop; may be called twice."""
        self._closed = True
        if self._pool is not None:
            self._pool.close()
        if self._loop is not None:
            self._loop.close()


def _is_plain(function: Any) -> bool:
    """True for a function that is called, False for a coroutine function or a reward model."""
    return not (isinstance(function, str | nn.Module) or is_async(function))


def _check(
    functions: Sequence[Any],
    weights: Sequence[float] | None,
    processing_classes: Sequence[PreTrainedTokenizerBase | None] | None,
) -> None:
    if not functions:
        raise ConfigError("No reward source provided: pass at least one function or reward model as reward_funcs.")
    for function in functions:
        is_model = isinstance(function, nn.Module)
        if not (callable(function) or isinstance(function, str)) or (is_model and not hasattr(function, "config")):
            raise ConfigError(
                f"reward_funcs holds {function!r} of type {type(function).__name__}; it takes functions, reward "
                "models of transformers, and folders or hub names of such models."
            )
    for name, values in (("reward_weights", weights), ("reward_processing_classes", processing_classes)):
        if values is not None and len(values) != len(functions):
            raise ConfigError(
                f"{name} has {len(values)} value(s) but there are {len(functions)} reward function(s); their "
                "numbers must match."
            )


def _warn_of_unscored(table: torch.Tensor, request: RewardRequest) -> None:
    unscored = table.isnan().all(1).nonzero().view(-1).tolist()
    if unscored:
        row = unscored[0]
        logger.warning(
            "All reward functions returned None for %d of %d completions; these learn nothing and no other completion "
            "is compared with them. The first: prompt %.200r, completion %.200r, %.400r",
            len(unscored),
            len(table),
            request.prompts[row],
            request.completions[row],
            {name: values[row] for name, values in request.columns.items()},
        )
