"""One rollout, from rows of the data set to a batch ready for the loss: encode, generate, score, compare."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from colocate_rl.collectives import Collectives
from colocate_rl.engine.protocol import Completion, SamplingSpec
from colocate_rl.metrics import MetricBuffer, PhaseClock
from colocate_rl.rollout import figures
from colocate_rl.rollout.advantages import ScoredGroups, score_groups
from colocate_rl.rollout.figures import Compared
from colocate_rl.rollout.generate import Generator
from colocate_rl.rollout.pending import Pending
from colocate_rl.rollout.prompts import PromptCodec
from colocate_rl.rollout.records import EngineStats, Prompt, RolloutBatch
from colocate_rl.rollout.rewardlog import extra_logger, metric_logger
from colocate_rl.rollout.rewards import Rewards
from colocate_rl.rollout.sampler import PROMPT_INDEX
from colocate_rl.rollout.stages import Answered, Asked, Rated, Row, Scored, numbered_copies
from colocate_rl.scoring.contract import passed_columns


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What stays the same for every rollout of a run."""

    sampling: SamplingSpec
    pad_token_id: int
    scale_rewards: str = "group"
    multi_objective_aggregation: str = "sum_then_normalize"
    mask_truncated_completions: bool = False
    pass_columns: bool = True
    """Give every column but the prompt to the reward functions."""
    deal_rows: bool = False
    """Train rows on the ranks that make tokens even, equally many on each; False: on those that asked for them."""


@dataclass(frozen=True, slots=True)
class Begun:
    """Rows whose completions the engines have been asked for."""

    rows: list[Row]
    pending: "Pending | Answered"
    """Asked for, or answered already (by a function of the user's, which does not return before)."""
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
            _, stats = self._generator.finish(pending)
            answered = self._answered(begun.rows, pending, range(len(pending.groups)), stats)
            if self._further is None:
                return answered
            first = {p.index: itertools.count(n) for p, n in pending.mine()}
            copies = [next(first[row[PROMPT_INDEX]]) for row in begun.rows]
            return self._further(Asked(answered, copies, pending.policy_version, begun.seed))

    def poll(self, begun: Begun, timeout_s: float) -> Answered:
        """This rank's rows of the groups that have become whole since the last call; every rank must call it."""
        assert isinstance(begun.pending, Pending)
        with self._clock.phase("generate"):
            whole = self._generator.poll(begun.pending, timeout_s)
            return self._answered(begun.rows, begun.pending, whole, [])

    @staticmethod
    def _answered(
        all_rows: Sequence[Row], pending: Pending, groups: Sequence[int], stats: list[EngineStats]
    ) -> Answered:
        prompts = {pending.groups[group].index: pending.groups[group].token_ids for group in groups}
        mine = [(prompt, first) for prompt, first in pending.mine() if prompt.index in prompts]
        answers = {prompt.index: iter(a) for (prompt, _), a in zip(mine, pending.rows(mine), strict=True)}
        places = [place for place, row in enumerate(all_rows) if row[PROMPT_INDEX] in prompts]
        rows = [all_rows[place] for place in places]
        completions = [next(answers[row[PROMPT_INDEX]]) for row in rows]
        prompt_ids = [prompts[row[PROMPT_INDEX]] for row in rows]
        return Answered(
            rows, prompt_ids, completions, stats, places=places, prompts=prompts, everyone=pending.completions
        )

    def rate(self, answered: Answered, metrics: MetricBuffer, *, trainer_state: Any) -> Rated:
        """Asks the reward functions about this rank's completions.

        Args:
            answered: by the engines.
            metrics: receives what reward functions log.
            trainer_state: handed to the reward functions.
        """
        rows, completions = answered.rows, answered.completions
        extras: dict[str, list[Any]] = {}
        for name, (numerator, denominator) in answered.figures.items():
            metrics.share(name, torch.tensor(numerator), torch.tensor(denominator))
        with self._clock.phase("score"), self._collectives.failing_together("scoring completions"):
            texts = answered.texts
            if texts is None:
                texts = [
                    self.codec.decode(row["prompt"], completion.token_ids, ids)
                    for row, ids, completion in zip(rows, answered.prompt_ids, completions, strict=True)
                ]
            rewards = self.rewards.score(
                [row["prompt"] for row in rows],
                texts,
                [list(completion.token_ids) for completion in completions],
                {**self._columns(rows), **answered.columns},
                groups=[row[PROMPT_INDEX] for row in rows],
                trainer_state=trainer_state,
                log_extra=extra_logger(extras, len(rows)),
                log_metric=metric_logger(metrics),
            )
        return Rated(answered, texts, rewards, extras)

    def finish(self, rated: Rated, metrics: MetricBuffer, *, to_train: bool = False) -> tuple[Scored, RolloutBatch]:
        """Compares completions, each with the others of its group; every rank must call it.

        Args:
            rated: this rank's rows.
            metrics: receives the figures of the rollout.
            to_train: deal rows to ranks where the settings say so; else the batch has this rank's.

        Returns:
            The scored rows, and the padded batch (on the CPU).
        """
        scored, compared = self.compare(rated)
        self.log(compared, metrics)
        if not (to_train and self.deals_rows and rated.answered.everyone):
            return scored, self.own(scored)
        parts = figures.deal_rows(compared, compared.num_rows)
        tokens = compared.tokens()
        figures.log_deal(metrics, compared, [sum(tokens[row] for row in part) for part in parts])
        return scored, self.dealt(rated.answered, compared, parts[self._collectives.rank])

    @property
    def deals_rows(self) -> bool:
        """Whether ranks train each other's rows."""
        return self.settings.deal_rows and self._collectives.world_size > 1

    def compare(self, rated: Rated) -> tuple[Scored, Compared]:
        """This rank's scored rows, and all ranks' advantages; the groups must be whole."""
        answered = rated.answered
        with self._clock.phase("score"):
            compared = self._compare(answered, rated.rewards)
        mine = compared.rows_of(self._collectives.rank)
        advantages = compared.advantages[mine.start : mine.stop]
        scored = Scored(
            answered.rows,
            answered.prompt_ids,
            answered.completions,
            rated.texts,
            rated.rewards,
            advantages,
            rated.extras,
        )
        return scored, compared

    def log(self, compared: Compared, metrics: MetricBuffer) -> None:
        """Adds the figures of a whole generation batch."""
        figures.log_lengths(metrics, compared)
        positions = figures.group_positions(compared.indices())
        figures.log_rewards(metrics, self.rewards.names, compared.rewards, self._groups(compared.rewards[positions]))

    def dealt(self, answered: Answered, compared: Compared, chosen: Sequence[int]) -> RolloutBatch:
        """The chosen ones of all ranks' rows as a padded batch on the CPU."""
        keys = numbered_copies(compared.indices())
        prompts = [answered.prompts[keys[row][0]] for row in chosen]
        completions = [answered.everyone[keys[row]] for row in chosen]
        return self._batch(prompts, completions, compared.advantages[list(chosen)])

    def own(self, scored: Scored) -> RolloutBatch:
        """This rank's rows as a padded batch on the CPU."""
        return self._batch(scored.prompt_ids, scored.completions, scored.advantages)

    def _batch(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion], advantages: torch.Tensor
    ) -> RolloutBatch:
        return RolloutBatch.from_rows(
            prompts,
            completions,
            advantages,
            keep=[not (self.settings.mask_truncated_completions and c.finish_reason != "stop") for c in completions],
            pad_token_id=self.settings.pad_token_id,
        )

    def collect(
        self,
        rows: Sequence[Row],
        metrics: MetricBuffer,
        *,
        trainer_state: Any,
        seed: int | None,
        policy_version: int = 0,
    ) -> tuple[Scored, RolloutBatch, list[EngineStats]]:
        """:meth:`sample` and :meth:`finish` in one call."""
        rated = self.sample(rows, metrics, trainer_state=trainer_state, seed=seed, policy_version=policy_version)
        scored, batch = self.finish(rated, metrics)
        return scored, batch, rated.answered.stats

    def sample(
        self,
        rows: Sequence[Row],
        metrics: MetricBuffer,
        *,
        trainer_state: Any,
        seed: int | None,
        policy_version: int = 0,
    ) -> Rated:
        """:meth:`begin`, :meth:`wait` and :meth:`rate` in one call."""
        answered = self.wait(self.begin(rows, policy_version=policy_version, seed=seed))
        return self.rate(answered, metrics, trainer_state=trainer_state)

    def _encode(self, rows: Sequence[Row]) -> list[Prompt]:
        """This rank's distinct prompts, each tokenised once."""
        copies = Counter(row[PROMPT_INDEX] for row in rows)
        prompts = {row[PROMPT_INDEX]: row["prompt"] for row in reversed(rows)}  # the first copy speaks for all
        return [Prompt(index, self.codec.encode(prompts[index]), count) for index, count in copies.items()]

    def _columns(self, rows: Sequence[Row]) -> dict[str, list[Any]]:
        if not self.settings.pass_columns or not rows:
            return {}
        names = passed_columns(rows[0])
        return {name: [row[name] for row in rows] for name in names if name != PROMPT_INDEX}

    def _compare(self, answered: Answered, rewards: torch.Tensor) -> Compared:
        """Advantages of all ranks' rows, from all ranks' rewards."""
        facts = torch.tensor(
            [
                [row[PROMPT_INDEX], len(ids), completion.num_sampled, completion.finish_reason == "stop"]
                for row, ids, completion in zip(answered.rows, answered.prompt_ids, answered.completions, strict=True)
            ],
            dtype=torch.float64,
        ).view(-1, 4)
        parts = self._collectives.gather_ragged(torch.cat([facts, rewards.to(torch.float64)], dim=1))
        table = torch.cat(parts)
        positions = figures.group_positions(table[:, 0].long().tolist())
        all_rewards = table[:, 4:].float()
        advantages = torch.zeros(len(table))
        advantages[positions.view(-1)] = self._groups(all_rewards[positions]).advantages.view(-1)
        return Compared(table[:, :4], all_rewards, advantages, [len(part) for part in parts])

    def _groups(self, rewards: torch.Tensor) -> ScoredGroups:
        """Rewards [P, G, F] of whole groups, compared."""
        return score_groups(
            rewards,
            self.rewards.weights,
            aggregation=self.settings.multi_objective_aggregation,
            scale_rewards=self.settings.scale_rewards,
        )
