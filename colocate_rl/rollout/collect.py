"""One rollout, from rows of the data set to a batch ready for the loss: encode, generate, score, compare."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from colocate_rl.collectives import Collectives
from colocate_rl.engine.protocol import Completion, SamplingSpec
from colocate_rl.metrics import MetricBuffer, PhaseClock
from colocate_rl.rollout.advantages import ScoredGroups, group_advantages, weighted_sum
from colocate_rl.rollout.generate import Generator, Pending
from colocate_rl.rollout.prompts import PromptCodec
from colocate_rl.rollout.records import EngineStats, Prompt, RolloutBatch
from colocate_rl.rollout.rewards import Rewards
from colocate_rl.rollout.sampler import PROMPT_INDEX

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What stays the same for every rollout of a run."""

    sampling: SamplingSpec
    pad_token_id: int
    scale_rewards: str = "group"
    mask_truncated_completions: bool = False
    pass_columns: bool = True
    """Give every column but the prompt to the reward functions."""


@dataclass(slots=True)
class Scored:
    """This rank's rows of one rollout; one entry per row in each list."""

    rows: list[Row]
    prompt_ids: list[tuple[int, ...]]
    completions: list[Completion]
    texts: list[Any]
    """What reward functions saw: strings, or lists of messages."""
    rewards: torch.Tensor
    """float32 [n, F], NaN for None."""
    advantages: torch.Tensor
    """float32 [n]."""
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """Columns that reward functions added with ``log_extra``."""


@dataclass(frozen=True, slots=True)
class Begun:
    """Rows whose completions the engines have been asked for."""

    rows: list[Row]
    pending: "Pending | Answered"
    """Asked for, or answered already (by a function of the user's, which does not return before)."""
    seed: int | None


@dataclass(frozen=True, slots=True)
class Answered:
    """This rank's rows with their completions; one entry per row in each list but ``stats``."""

    rows: list[Row]
    prompt_ids: list[tuple[int, ...]]
    completions: list[Completion]
    stats: list[EngineStats]
    """One record per engine and call."""
    texts: list[Any] | None = None
    """What reward functions see, where it is more than the decoded completions: dialogues."""
    columns: Mapping[str, list[Any]] = field(default_factory=dict)
    """Further arguments of the reward functions."""
    figures: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Further figures for the log: this rank's numerator and denominator."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Rows of this rank that the engines have answered once."""

    answered: Answered
    copies: list[int]
    """Of each row: which copy of its prompt it is, counted over all ranks."""
    policy_version: int
    seed: int | None


Further = Callable[[Asked], Answered]
"""Takes completions on to their end where one call of the engines is not enough; every rank calls it."""
Replacement = Callable[[Sequence[Row], int, int | None], Answered]
"""Answers rows in place of the engines: rows, policy version, seed of the generation batch; every rank calls it."""


class Rollout:
    """Collects rollouts for this rank; all ranks call :meth:`collect` together.

    Args:
        codec: prompts to ids and ids to text.
        generator: reaches all engines.
        rewards: the reward functions.
        collectives: of the training ranks.
        settings: see :class:`RolloutSettings`.
        clock: charges the phases "generate" and "score".
        further: goes on with completions that call tools; None: none do.
        replacement: a function of the user's that answers instead of the engines; None: they do.
    """

    def __init__(
        self,
        codec: PromptCodec,
        generator: Generator,
        rewards: Rewards,
        collectives: Collectives,
        settings: RolloutSettings,
        clock: PhaseClock,
        *,
        further: Further | None = None,
        replacement: Replacement | None = None,
    ) -> None:
        self.codec = codec
        self.rewards = rewards
        self.settings = settings
        self._generator = generator
        self._collectives = collectives
        self._clock = clock
        self._further = further
        self._replacement = replacement

    def begin(self, rows: Sequence[Row], *, policy_version: int, seed: int | None) -> Begun:
        """Asks the engines for one completion per row.

        Args:
            rows: this rank's rows; rows with the same prompt index, on any rank, form a group. May be empty.
            policy_version: of the weights the engines have.
            seed: see :meth:`colocate_rl.rollout.generate.Generator.begin`.
        """
        if self._replacement is not None:
            with self._clock.phase("generate"):
                return Begun(list(rows), self._replacement(rows, policy_version, seed), seed)
        with self._collectives.failing_together("encoding prompts"):
            prompts = self._encode(rows)
        with self._clock.phase("generate"):
            pending = self._generator.begin(prompts, self.settings.sampling, policy_version=policy_version, seed=seed)
        return Begun(list(rows), pending, seed)

    def wait(self, begun: Begun) -> Answered:
        """Waits until the engines have answered, and only that: an engine is free for other work afterwards."""
        pending = begun.pending
        if isinstance(pending, Answered):
            return pending
        with self._clock.phase("generate"):
            answers, stats = self._generator.finish(pending)
            by_index = {p.index: (p.token_ids, iter(a)) for p, a in zip(pending.prompts, answers, strict=True)}
            prompt_ids = [by_index[row[PROMPT_INDEX]][0] for row in begun.rows]
            completions = [next(by_index[row[PROMPT_INDEX]][1]) for row in begun.rows]
            answered = Answered(begun.rows, prompt_ids, completions, stats)
            if self._further is None:
                return answered
            first = {p.index: itertools.count(n) for p, n in zip(pending.prompts, pending.first_copy, strict=True)}
            copies = [next(first[row[PROMPT_INDEX]]) for row in begun.rows]
            return self._further(Asked(answered, copies, pending.policy_version, begun.seed))

    def score(self, answered: Answered, metrics: MetricBuffer, *, trainer_state: Any) -> tuple[Scored, RolloutBatch]:
        """Scores the completions, each against the others of its group.

        Args:
            answered: by the engines.
            metrics: receives the figures of the rollout.
            trainer_state: handed to the reward functions.

        Returns:
            The scored rows, and the padded batch (on the CPU, rows in order).
        """
        completions = answered.completions
        with self._clock.phase("score"):
            scored = self._score(answered, metrics, trainer_state)
        for name, (numerator, denominator) in answered.figures.items():
            metrics.share(name, torch.tensor(numerator), torch.tensor(denominator))
        batch = RolloutBatch.from_rows(
            answered.prompt_ids,
            completions,
            scored.advantages,
            keep=[not (self.settings.mask_truncated_completions and c.finish_reason != "stop") for c in completions],
            pad_token_id=self.settings.pad_token_id,
        )
        return scored, batch

    def collect(
        self,
        rows: Sequence[Row],
        metrics: MetricBuffer,
        *,
        trainer_state: Any,
        seed: int | None,
        policy_version: int = 0,
    ) -> tuple[Scored, RolloutBatch, list[EngineStats]]:
        """:meth:`begin`, :meth:`wait` and :meth:`score` in one call."""
        answered = self.wait(self.begin(rows, policy_version=policy_version, seed=seed))
        scored, batch = self.score(answered, metrics, trainer_state=trainer_state)
        return scored, batch, answered.stats

    def _encode(self, rows: Sequence[Row]) -> list[Prompt]:
        """This rank's distinct prompts, each tokenised once."""
        copies: dict[int, int] = {}
        first: dict[int, Row] = {}
        for row in rows:
            index = row[PROMPT_INDEX]
            copies[index] = copies.get(index, 0) + 1
            first.setdefault(index, row)
        return [Prompt(index, self.codec.encode(first[index]["prompt"]), count) for index, count in copies.items()]

    def _score(
        self,
        answered: Answered,
        metrics: MetricBuffer,
        trainer_state: Any,
    ) -> Scored:
        rows, prompt_ids, completions = answered.rows, answered.prompt_ids, answered.completions
        extras: dict[str, list[Any]] = {}
        with self._collectives.failing_together("scoring completions"):
            texts = answered.texts
            if texts is None:
                texts = [
                    self.codec.decode(row["prompt"], completion.token_ids, ids)
                    for row, ids, completion in zip(rows, prompt_ids, completions, strict=True)
                ]
            rewards = self.rewards.score(
                [row["prompt"] for row in rows],
                texts,
                [list(completion.token_ids) for completion in completions],
                {**self._columns(rows), **answered.columns},
                trainer_state=trainer_state,
                log_extra=_extra_logger(extras, len(rows)),
                log_metric=_metric_logger(metrics),
            )
        advantages = self._compare(rows, prompt_ids, completions, rewards, metrics)
        return Scored(rows, prompt_ids, completions, texts, rewards, advantages, extras)

    def _columns(self, rows: Sequence[Row]) -> dict[str, list[Any]]:
        if not self.settings.pass_columns or not rows:
            return {}
        names = [name for name in rows[0] if name not in ("prompt", PROMPT_INDEX, "completion", "completion_ids")]
        return {name: [row[name] for row in rows] for name in names}

    def _compare(
        self,
        rows: Sequence[Row],
        prompt_ids: Sequence[tuple[int, ...]],
        completions: Sequence[Completion],
        rewards: torch.Tensor,
        metrics: MetricBuffer,
    ) -> torch.Tensor:
        """Advantages of this rank's rows, from all ranks' rewards; and the figures made of them."""
        facts = torch.tensor(
            [
                [row[PROMPT_INDEX], len(ids), completion.num_sampled, completion.finish_reason == "stop"]
                for row, ids, completion in zip(rows, prompt_ids, completions, strict=True)
            ],
            dtype=torch.float64,
        ).view(-1, 4)
        parts = self._collectives.gather_ragged(torch.cat([facts, rewards.to(torch.float64)], dim=1))
        table = torch.cat(parts)
        columns = group_positions(table[:, 0].long().tolist())
        all_rewards = table[:, 4:].float()
        totals = weighted_sum(all_rewards, self.rewards.weights)
        groups = group_advantages(totals[columns], self.settings.scale_rewards)
        advantages = torch.zeros(len(table))
        advantages[columns.view(-1)] = groups.advantages.view(-1)
        _log_lengths(metrics, table[:, 1], table[:, 2], table[:, 3].bool())
        _log_rewards(metrics, self.rewards.names, all_rewards, groups)
        start = sum(len(part) for part in parts[: self._collectives.rank])
        return advantages[start : start + len(rows)]


def group_positions(indices: Sequence[int]) -> torch.Tensor:
    """Where the members of each group stand: int64 [P, G] positions in ``indices``, groups in order of appearance."""
    positions: dict[int, list[int]] = {}
    for position, index in enumerate(indices):
        positions.setdefault(index, []).append(position)
    sizes = {len(members) for members in positions.values()}
    assert len(sizes) == 1, f"groups of different sizes {sizes} in one generation batch"
    return torch.tensor(list(positions.values()), dtype=torch.int64)


RESERVED_METRICS = re.compile(
    r"(loss|grad_norm|learning_rate|epoch|step|step_time|num_tokens|kl|entropy|reward|reward_std|frac_reward_zero_std|"
    r"staleness)$|(completions|prompts|rewards|engine|time|clip_ratio|policy_ratio|sampling|tools)/|eval_"
)
"""Names of the trainer's own figures."""


def _metric_logger(metrics: MetricBuffer) -> Callable[[str, float], None]:
    def log_metric(name: str, value: float) -> None:
        if RESERVED_METRICS.match(name):
            raise ValueError(f"log_metric({name!r}): the trainer logs a figure of that name itself. Use another one.")
        metrics.mean(name, value)

    return log_metric


def _extra_logger(extras: dict[str, list[Any]], expected: int) -> Callable[[str, Sequence[Any]], None]:
    def log_extra(column: str, values: Sequence[Any]) -> None:
        if column in ("step", "prompt", "completion", "advantage"):
            raise ValueError(f"log_extra({column!r}): the table has a column of that name itself. Use another one.")
        if len(values) != expected:
            raise ValueError(f"log_extra({column!r}) got {len(values)} value(s) for {expected} completions.")
        extras[column] = list(values)

    return log_extra


def _log_lengths(
    metrics: MetricBuffer, prompt_lengths: torch.Tensor, lengths: torch.Tensor, terminated: torch.Tensor
) -> None:
    weight = len(lengths)
    ended = lengths[terminated] if bool(terminated.any()) else torch.zeros(1, dtype=torch.float64)
    for name, values in (("length", lengths), ("terminated_length", ended)):
        metrics.mean(f"completions/mean_{name}", values.mean(), weight)
        metrics.mean(f"completions/min_{name}", values.min(), weight)
        metrics.mean(f"completions/max_{name}", values.max(), weight)
    metrics.mean("completions/clipped_ratio", (~terminated).double().mean(), weight)
    metrics.mean("prompts/mean_length", prompt_lengths.mean(), weight)


def _log_rewards(metrics: MetricBuffer, names: Sequence[str], rewards: torch.Tensor, groups: ScoredGroups) -> None:
    weight = len(rewards)
    for name, column in zip(names, rewards.unbind(-1), strict=True):
        known = column[~column.isnan()]
        metrics.mean(f"rewards/{name}/mean", known.mean() if len(known) else torch.tensor(torch.nan), weight)
        metrics.mean(f"rewards/{name}/std", known.std() if len(known) > 1 else torch.tensor(0.0), weight)
    totals = groups.rewards[~groups.rewards.isnan()]
    metrics.mean("reward", totals.mean() if len(totals) else torch.tensor(torch.nan), weight)
    metrics.mean("reward_std", totals.std() if len(totals) > 1 else torch.tensor(0.0), weight)
    metrics.mean("frac_reward_zero_std", (groups.group_std < 1e-8).double().mean(), weight)
