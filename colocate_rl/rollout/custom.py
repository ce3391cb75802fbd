"""A user's own rollout function in place of one call of the engines, and the way to the engines from inside it."""

import copy
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from colocate_rl.collectives import Collectives
from colocate_rl.engine.protocol import Completion, SamplingSpec
from colocate_rl.errors import ConfigError, PeerError, RolloutError, is_only_here
from colocate_rl.rollout.generate import Generator
from colocate_rl.rollout.prompts import PromptCodec
from colocate_rl.rollout.records import EngineStats, Prompt
from colocate_rl.rollout.stages import Answered, Row
from colocate_rl.scoring.contract import HELPERS

RolloutFunction = Callable[[list[Any], Any], Mapping[str, Any]]
"""``rollout_func(prompts, trainer)``, as in TRL."""

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
RESERVED = frozenset({"prompt", "prompts", "completion", "completions", "environments", *HELPERS})
"""Names of extra fields that reward functions get anyway."""


def agree(collectives: Collectives, word: str, error: BaseException | None = None) -> None:
    """Makes sure that all ranks stand at the same point of the user's code; every rank must call it.

    Args:
        collectives: of the training ranks.
        word: what this rank is about to do.
        error: what the user's code raised here instead.

    Raises:
        RolloutError: when ranks are about to do different things.
    """
    words = collectives.gather_objects(word if error is None else None)
    if error is None and set(words) == {word}:
        return
    with collectives.failing_together("calling rollout_func"):
        if error is not None:
            raise error
        if None not in words:
            other = next(rank for rank, theirs in enumerate(words) if theirs != words[0])
            raise RolloutError(
                f"rank 0 is about to {words[0]} while rank {other} is about to {words[other]}. trainer.generate is "
                "answered for all ranks at once: every rank must call it equally often and with the same sampling "
                "settings, also where it has no prompts."
            )


class FreeGenerator:
    """Completions for any prompts: what ``GRPOTrainer.generate`` calls.

    Args:
        codec: encodes prompts.
        generator: reaches all engines.
        collectives: of the training ranks.
        sampling: the run's; a call may override its fields.
    """

    def __init__(
        self, codec: PromptCodec, generator: Generator, collectives: Collectives, sampling: SamplingSpec
    ) -> None:
        self._codec = codec
        self._generator = generator
        self._collectives = collectives
        self._sampling = sampling
        self._seed: int | None = None
        self._num_calls = 0
        self.stats: list[EngineStats] = []
        """What the engines did since the batch began, call by call."""

    def begin_batch(self, seed: int | None) -> None:
        """A generation batch begins: seeds of the calls to come derive from ``seed`` and their number."""
        self._seed = seed
        self._num_calls = 0
        self.stats = []

    def __call__(
        self,
        prompts: Sequence[Any],
        num_generations: int,
        overrides: Mapping[str, Any],
        prepare: Callable[[], None],
    ) -> dict[str, list[Any]]:
        """See :meth:`colocate_rl.GRPOTrainer.generate`.

        Args:
            prompts: this rank's.
            num_generations: of each.
            overrides: fields of :class:`SamplingSpec`.
            prepare: brings the engines up to date; called once all ranks are known to be here.
        """
        error: Exception | None = None
        word = ""
        try:
            sampling = self._overridden(overrides)
            word = f"generate with {sampling}"
        except ConfigError as caught:
            error = caught
        agree(self._collectives, word, error)
        prepare()
        with self._collectives.failing_together("encoding prompts"):
            encoded = [self._encode(prompt) for prompt in prompts]
        counts = self._collectives.gather_objects(len(encoded))
        start = sum(counts[: self._collectives.rank])  # each prompt is a group of its own, named by its place
        mine = [Prompt(start + place, ids, num_generations) for place, ids in enumerate(encoded)]
        seed = None if self._seed is None else zlib.crc32(f"{self._seed}/call {self._num_calls}".encode())
        with self._generator.other_prompts():
            answers, stats = self._generator.generate(mine, sampling, seed)
        self._num_calls += 1
        self.stats += stats
        flat = [(ids, completion) for ids, answer in zip(encoded, answers, strict=True) for completion in answer]
        return {
            "prompt_ids": [list(ids) for ids, _ in flat],
            "completion_ids": [list(completion.token_ids) for _, completion in flat],
            "logprobs": [list(completion.sampling_logprobs) for _, completion in flat],
        }

    def _overridden(self, overrides: Mapping[str, Any]) -> SamplingSpec:
        known = [item.name for item in fields(SamplingSpec)]
        unknown = sorted(overrides.keys() - known)
        if unknown:
            raise ConfigError(f"generate got unknown argument(s) {', '.join(unknown)}. Known: {', '.join(known)}.")
        return replace(self._sampling, **overrides)

    def _encode(self, prompt: Any) -> tuple[int, ...]:
        if isinstance(prompt, list | tuple) and prompt and all(isinstance(token, int) for token in prompt):
            return tuple(prompt)
        return self._codec.encode(prompt)


class CustomRollout:
    """Answers rows with the user's function.

    Args:
        function: see :data:`RolloutFunction`.
        trainer: handed to it.
        engines: what ``trainer.generate`` uses.
        collectives: of the training ranks.
        end_token_ids: a completion whose last token is one of them ended by itself.
        vocab_size: ids of the policy; None when unknown.
        window: context window in tokens; None: no limit.
    """

    def __init__(
        self,
        function: RolloutFunction,
        trainer: Any,
        engines: FreeGenerator,
        collectives: Collectives,
        *,
        end_token_ids: Sequence[int],
        vocab_size: int | None,
        window: int | None,
    ) -> None:
        self._function = function
        self._trainer = trainer
        self._engines = engines
        self._collectives = collectives
        self._ends = frozenset(end_token_ids)
        self._vocab_size = vocab_size
        self._window = window

    def __call__(self, rows: Sequence[Row], policy_version: int, seed: int | None) -> Answered:
        """Calls the function with this rank's prompts, one per row; every rank must call it.

        Raises:
            RolloutError: when it returns something that is no rollout.
        """
        self._engines.begin_batch(seed)
        output: Any = None
        error: BaseException | None = None
        try:
            output = self._function([copy.deepcopy(row["prompt"]) for row in rows], self._trainer)
        except (Exception, SystemExit) as caught:
            if isinstance(caught, PeerError) or is_only_here(caught):
                raise  # all ranks have agreed on it inside a call of ours
            error = caught
        agree(self._collectives, "return from rollout_func", error)
        with self._collectives.failing_together("reading what rollout_func returned"):
            return self._read(output, rows, policy_version)

    def _read(self, output: Any, rows: Sequence[Row], policy_version: int) -> Answered:
        if not isinstance(output, Mapping):
            raise RolloutError(f"rollout_func must return a dictionary, it returned {type(output).__name__}.")
        missing = [name for name in REQUIRED if output.get(name) is None]
        if missing:
            raise RolloutError(
                f"rollout_func must return keys {missing} in its output dict: one list per prompt under each of "
                f"{list(REQUIRED)}. trainer.generate returns all three."
            )
        masks = output.get("env_mask")
        per_row = {name: output[name] for name in REQUIRED} | ({} if masks is None else {"env_mask": masks})
        for name, values in per_row.items():
            if len(values) != len(rows):
                raise RolloutError(
                    f"rollout_func returned {len(values)} {name} for {len(rows)} prompts. It gets one prompt per "
                    "completion (each num_generations times) and must answer each once."
                )
        prompt_ids, completions = [], []
        for place in range(len(rows)):
            prompt, ids, logprobs = ([*output[name][place]] for name in REQUIRED)
            sampled = [True] * len(ids) if masks is None else [bool(value) for value in masks[place]]
            self._check_row(place, prompt, ids, logprobs, sampled)
            prompt_ids.append(tuple(int(token) for token in prompt))
            completions.append(self._completion(ids, logprobs, sampled, policy_version))
        columns = _columns({k: v for k, v in output.items() if k not in (*REQUIRED, "env_mask")}, len(rows))
        return Answered(list(rows), prompt_ids, completions, self._engines.stats, columns=columns)

    def _check_row(self, place: int, prompt: list[Any], ids: list[Any], logprobs: list[Any], mask: list[bool]) -> None:
        where = f"rollout_func, completion {place} of this rank"
        if not len(ids) == len(logprobs) == len(mask):
            raise RolloutError(
                f"{where}: {len(ids)} completion_ids, {len(logprobs)} logprobs and {len(mask)} env_mask values. Each "
                "id needs one log-probability (0.0 where env_mask is 0)."
            )
        if not prompt:
            raise RolloutError(f"{where}: prompt_ids is empty, and the first token needs one before it.")
        tokens = [*prompt, *ids]
        if min(tokens) < 0 or (self._vocab_size is not None and max(tokens) >= self._vocab_size):
            raise RolloutError(
                f"{where}: ids from {min(tokens)} to {max(tokens)}, but the model has {self._vocab_size} embeddings."
            )
        if self._window is not None and len(tokens) > self._window:
            raise RolloutError(
                f"{where}: {len(prompt)} + {len(ids)} tokens, but the context window holds {self._window}."
            )

    def _completion(self, ids: list[Any], logprobs: list[Any], sampled: list[bool], policy_version: int) -> Completion:
        return Completion(
            [int(token) for token in ids],
            [float(value) if own else 0.0 for value, own in zip(logprobs, sampled, strict=True)],
            "stop" if ids and int(ids[-1]) in self._ends else "length",
            policy_version,
            None if all(sampled) else sampled,
        )


def _columns(extra: Mapping[str, Any], num_rows: int) -> dict[str, list[Any]]:
    """Further fields as arguments of reward functions: a list has one value per completion, all else holds for each.

    Raises:
        RolloutError: for a list of another length, or a name that is taken.
    """
    columns = {}
    for name, values in extra.items():
        if name in RESERVED:
            raise RolloutError(f"rollout_func returned {name!r}, which reward functions get anyway. Use another name.")
        if isinstance(values, list) and len(values) != num_rows:
            raise RolloutError(
                f"rollout_func returned {len(values)} value(s) under {name!r} for {num_rows} completions; a list must "
                "have one for each."
            )
        columns[name] = values if isinstance(values, list) else [values] * num_rows
    return columns
