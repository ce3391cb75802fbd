"""What a run writes down: figures of rollouts and steps, the completions table, and ``metrics.jsonl``."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from colocate_rl.collectives import Collectives
from colocate_rl.completions import CompletionLog
from colocate_rl.config import GRPOConfig
from colocate_rl.metrics import MetricBuffer, PhaseClock
from colocate_rl.rollout.collect import Answered, Scored
from colocate_rl.rollout.prompts import PromptCodec
from colocate_rl.rollout.records import EngineStats

METRICS_FILE = "metrics.jsonl"
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
            scored.extras,
        )
        for prompts, completions, rewards, advantages, extras in self._collectives.gather_objects(mine):
            self.completions.add(prompts, completions, rewards, advantages, extras)

    def note_step(self) -> None:
        """Logs how long the optimizer step took, phase by phase, and how idle each side was."""
        total, phases = self.clock.lap()
        others = {name: phases.get(name, 0.0) for name in PHASES}
        train = max(total - sum(others.values()), 0.0)
        self.metrics.mean("step_time", total)
        for name, seconds in {**others, "train": train}.items():
            self.metrics.mean(f"time/{name}_s", seconds)
        busy = sum(self._engine_seconds) / len(self._engine_seconds) + others["sync"]
        self.metrics.mean("time/idle_train", 1 - train / total)
        self.metrics.mean("time/overlap_efficiency", min(1.0, max(train, *self._engine_seconds) / total))
        self.metrics.mean("time/idle_generate", max(0.0, 1 - busy / total))
        self._engine_seconds = [0.0] * len(self._engine_seconds)

    def write(self, step: int, logs: Mapping[str, Any], *, with_completions: bool) -> list[dict[str, Any]]:
        """Appends one record to ``metrics.jsonl``, and writes the completions table; on the main rank only.

        Returns:
            The rows of the table; none without one.
        """
        folder = Path(self._args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / METRICS_FILE).open("a") as lines:
            lines.write(json.dumps({"step": step, **logs}) + "\n")
        if not (with_completions and self._args.log_completions):
            return []
        return self.completions.flush(
            step,
            folder / "completions",
            num_to_print=self._args.num_completions_to_print,
            unique_prompts=self._args.log_unique_prompts,
            console=Console(),
        )
