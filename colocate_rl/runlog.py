"""What a run writes down: figures of rollouts and steps (``metrics.jsonl``), who did what when, completions."""

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from colocate_rl.balance import imbalance
from colocate_rl.collectives import Collectives
from colocate_rl.completions import CompletionLog, sendable
from colocate_rl.config import GRPOConfig
from colocate_rl.metrics import Lap, MetricBuffer, PhaseClock, PhaseSpan
from colocate_rl.report.figures import METRICS_FILE
from colocate_rl.report.samples import COMPLETIONS_FOLDER
from colocate_rl.rewardtrace import TRACE_FILE, RewardTrace
from colocate_rl.rollout.figures import gather_rewards
from colocate_rl.rollout.prompts import PromptCodec
from colocate_rl.rollout.records import EngineStats
from colocate_rl.rollout.sampler import PROMPT_INDEX
from colocate_rl.rollout.stages import Answered, Row, Scored

logger = logging.getLogger(__name__)

TIMELINE_FILE = "timeline.jsonl"
PHASES = ("generate", "score", "sync")
"""Phases with a clock of their own; the rest of a step is training."""


class RunLog:
    """Collects a run's figures between two logs.

    Args:
        args: the run's configuration.
        collectives: of the training ranks.
        clock: of the phases of a step.
        num_engines: K.
        reward_names: columns of the completions table.
    """

    def __init__(
        self,
        args: GRPOConfig,
        collectives: Collectives,
        clock: PhaseClock,
        num_engines: int,
        reward_names: Sequence[str],
    ) -> None:
        self.metrics = MetricBuffer()
        self.clock = clock
        self.completions = CompletionLog(args.generation_batch_size or 1, reward_names)
        self._args = args
        self._collectives = collectives
        self._engine_seconds = [0.0] * num_engines
        self._events: list[dict[str, Any]] = []
        self._timeline: list[dict[str, Any]] = []
        self._reward_names = list(reward_names)
        self._trace: RewardTrace | None = None

    @property
    def _folder(self) -> Path:
        """The output folder of now: a notebook may name another one between two runs."""
        return Path(self._args.output_dir or ".")

    def begin(self, step: int) -> None:
        """A run begins after optimizer step ``step``: what another one left is no part of it; every rank must call it.

        What an interrupted run has not logged yet is dropped. The files of a run that is not resumed are set aside.
        """
        if self._trace is not None:
            self._trace.close()
            self._trace = None
        if step == 0:
            with self._collectives.failing_together("setting the files of an earlier run aside"):
                if self._collectives.rank == 0:
                    set_aside(self._folder)
        self.metrics.clear()
        self.completions.clear()
        self._engine_seconds = [0.0] * len(self._engine_seconds)
        self._events, self._timeline = [], []

    def note_tokens(self, num_tokens: int) -> None:
        """Logs the tokens that all ranks have trained on since the start of the run."""
        self.metrics.latest("num_tokens", num_tokens)

    def note_rollout(self, step: int, answered: Answered, scored: Scored, codec: PromptCodec) -> None:
        """Logs a generation batch whose training begins at optimizer step ``step``; every rank must call it."""
        self.note_staleness(answered, step)
        self.note_engines(answered.stats)
        self.note_completions(scored, codec)
        self.note_rewards(step, scored.rows, scored.rewards, trained=True)

    def note_engines(self, stats: Sequence[EngineStats]) -> None:
        """Logs what each engine did for a generation batch: an idle engine must be visible at once."""
        for stat in stats:
            name = f"engine/{stat.engine}"
            self.metrics.total(f"{name}/prompts", stat.num_prompts)
            self.metrics.total(f"{name}/tokens", stat.num_tokens)
            self.metrics.total(f"{name}/generate_s", stat.seconds)
            tokens, seconds = torch.tensor(float(stat.num_tokens)), torch.tensor(stat.seconds)
            self.metrics.share(f"{name}/tokens_per_s", tokens, seconds)
            self._engine_seconds[stat.engine] += stat.seconds
            for span in stat.spans if self._collectives.rank == 0 else ():
                self._add_event("generate", span.start, span.end, engine=stat.engine)
        if len(stats) > 1:
            self.metrics.mean("balance/engine_tokens_before", imbalance([stat.num_tokens_in_order for stat in stats]))
            self.metrics.mean("balance/engine_tokens", imbalance([stat.num_tokens for stat in stats]))
            self.metrics.mean("balance/engine_seconds", imbalance([stat.seconds for stat in stats]))

    def note_staleness(self, answered: Answered, policy_version: int) -> None:
        """Logs how many versions the policy is ahead of the completions it is about to learn from."""
        ages = [policy_version - completion.policy_version for completion in answered.completions]
        if ages:
            self.metrics.mean("staleness", sum(ages) / len(ages), len(ages))

    def note_completions(self, scored: Scored, codec: PromptCodec) -> None:
        """Adds all ranks' rows to the completions table, if there is one; every rank must call it."""
        if not self._args.log_completions:
            return
        mine = (
            [codec.prompt_text(row["prompt"]) for row in scored.rows],
            [codec.text(completion.token_ids) for completion in scored.completions],
            scored.rewards.tolist(),
            scored.advantages.tolist(),
            {name: sendable(values) for name, values in scored.extras.items()},
        )
        for prompts, completions, rewards, advantages, extras in self._collectives.gather_objects(mine):
            self.completions.add(prompts, completions, rewards, advantages, extras)

    def note_rewards(self, step: int, rows: Sequence[Row], rewards: torch.Tensor, *, trained: bool) -> None:
        """Appends all ranks' rewards to the trace, if there is one; every rank must call it."""
        if not self._args.log_reward_trace:
            return
        indices = [row[PROMPT_INDEX] for row in rows]
        all_indices, all_rewards = gather_rewards(self._collectives, indices, rewards)
        with self._collectives.failing_together("writing the reward trace"):
            if self._collectives.rank == 0:
                if self._trace is None:
                    self._trace = RewardTrace(self._folder, self._reward_names)
                self._trace.add(step, all_indices, all_rewards, trained=trained)

    def note_step(self) -> None:
        """Logs how long the optimizer step took, phase by phase, and how idle each side was."""
        lap = self.clock.lap()
        total = lap.total
        others = {name: lap.phases.get(name, 0.0) for name in PHASES}
        train = max(total - sum(others.values()), 0.0)
        self.metrics.mean("step_time", total)
        for name, seconds in {**others, "train": train}.items():
            self.metrics.mean(f"time/{name}_s", seconds)
        busy = sum(self._engine_seconds) / len(self._engine_seconds) + others["sync"]
        self.metrics.mean("time/idle_train", 1 - train / total)
        self.metrics.mean("time/overlap_efficiency", min(1.0, max(train, *self._engine_seconds) / total))
        self.metrics.mean("time/idle_generate", max(0.0, 1 - busy / total))
        self.metrics.mean(f"rank/{self._collectives.rank}/busy", train / total)
        for engine, seconds in enumerate(self._engine_seconds):
            self.metrics.mean(f"engine/{engine}/busy", min(1.0, seconds / total))
        self._engine_seconds = [0.0] * len(self._engine_seconds)
        for phase, start, end in with_training(lap):
            self._add_event(phase, start, end, rank=self._collectives.rank)

    def _add_event(self, phase: str, start: float, end: float, **who: int) -> None:
        if self._args.log_timeline:
            self._events.append({**who, "phase": phase, "start": start, "end": end})

    def flush(self) -> dict[str, float | None]:
        """All ranks' figures since the last call; every rank must call it."""
        if self._args.log_timeline:
            gathered = self._collectives.gather_objects(self._events)
            self._events = []
            events = [event for rank_events in gathered for event in rank_events]
            self._timeline = sorted(events, key=lambda event: event["start"])
        return self.metrics.flush(self._collectives)

    def _append(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / name).open("a") as lines:
            lines.writelines(json.dumps(record) + "\n" for record in records)

    def write(self, step: int, logs: Mapping[str, Any], *, with_completions: bool) -> list[dict[str, Any]]:
        """Appends to ``metrics.jsonl`` and ``timeline.jsonl``, writes the completions table; on the main rank only.

        Returns:
            The rows of the table; none without one.
        """
        self._append(METRICS_FILE, [{"step": step, **logs}])
        if self._timeline:
            self._append(TIMELINE_FILE, self._timeline)
            self._timeline = []
        if not (with_completions and self._args.log_completions):
            return []
        return self.completions.flush(
            step,
            self._folder / COMPLETIONS_FOLDER,
            num_to_print=self._args.num_completions_to_print,
            unique_prompts=self._args.log_unique_prompts,
            console=Console(),
        )


def set_aside(folder: Path) -> None:
    """Renames what an earlier run appended to, so that no report takes two runs for one; an evaluation stays."""
    path = folder / METRICS_FILE
    if not path.is_file() or not any(_step_of(line) for line in path.read_text("utf-8").splitlines()):
        return
    number = next(n for n in itertools.count(1) if not (folder / f"metrics.{n}.jsonl").exists())
    for name in (METRICS_FILE, TIMELINE_FILE, TRACE_FILE):
        if (folder / name).exists():
            (folder / name).rename((folder / name).with_suffix(f".{number}.jsonl"))
    logger.info("%s has the figures of an earlier run: they are in metrics.%d.jsonl now.", folder, number)


def _step_of(line: str) -> int:
    """Of a line of ``metrics.jsonl``; 0 for one that a kill cut short."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return 0


def with_training(lap: Lap) -> list[PhaseSpan]:
    """The spans of a step, with training wherever no other phase was under way."""
    spans, free = [], lap.start
    for span in lap.spans:
        if span.start > free:
            spans.append(PhaseSpan("train", free, span.start))
        spans.append(span)
        free = max(free, span.end)
    if lap.end > free:
        spans.append(PhaseSpan("train", free, lap.end))
    return spans
