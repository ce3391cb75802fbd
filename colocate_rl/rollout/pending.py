"""A generation batch that the engines have been asked for, and what has come of it so far."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from colocate_rl.engine.protocol import Completion, SamplingSpec, Work
from colocate_rl.errors import EngineError
from colocate_rl.placement import split_evenly
from colocate_rl.rollout.exchange import Answer
from colocate_rl.rollout.handout import Group, Part, Plan
from colocate_rl.rollout.records import Prompt


@dataclass(slots=True)
class Pending:
    """What was asked for, by whom, and what has come; the same on all ranks but for what is this rank's."""

    prompts: list[Prompt]
    """This rank's."""
    first_copy: list[int]
    """Of each of them, the first copy that is this rank's."""
    groups: list[Group]
    plan: Plan
    work: Work
    """Of the engine of this rank; without requests where there is none."""
    positions: list[int]
    """In the plan, of each request of ``work``."""
    sampling: SamplingSpec
    policy_version: int
    completions: dict[tuple[int, int], Completion] = field(default_factory=dict)
    """Those of all ranks that have come, by prompt index and copy."""
    missing: list[int] = field(default_factory=list)
    """Copies of each group that have not come."""
    answered: list[list[Part]] = field(default_factory=list)
    """Parts that each engine has answered."""

    @property
    def is_whole(self) -> bool:
        """Whether every completion has come."""
        return not any(self.missing)

    def mine(self) -> list[tuple[Prompt, int]]:
        """This rank's prompts, each with its first copy."""
        return list(zip(self.prompts, self.first_copy, strict=True))

    def rows(self, prompts: Sequence[tuple[Prompt, int]]) -> list[list[Completion]]:
        """Completions of some of this rank's prompts, each given with its first copy."""
        return [
            [self.completions[prompt.index, copy] for copy in range(first, first + prompt.num_copies)]
            for prompt, first in prompts
        ]

    def checked(self, answers: Sequence[Answer]) -> list[Answer]:
        """Answers to requests of ``work``, named by their positions in the plan instead.

        Raises:
            EngineError: when completions or log-probabilities are missing.
        """
        for request, completions in answers:
            wanted = self.work.requests[request].num_completions
            if len(completions) != wanted:
                raise EngineError(
                    f"the engine was asked for {wanted} completions of a prompt and gave {len(completions)}."
                )
            for completion in completions:
                if len(completion.token_ids) != len(completion.sampling_logprobs):
                    raise EngineError(
                        f"the engine gave {len(completion.token_ids)} token ids but "
                        f"{len(completion.sampling_logprobs)} log-probabilities for one completion."
                    )
        return [(self.positions[request], completions) for request, completions in answers]

    def take(self, engine: int, answers: Iterable[tuple[int, Completion]]) -> None:
        """Keeps what an engine has answered, part by part: position in the plan and completion, copy by copy."""
        for position, copies in itertools.groupby(answers, key=itemgetter(0)):
            part = self.plan.parts[position]
            for copy, (_, completion) in enumerate(copies, part.first_copy):
                self.completions[self.groups[part.group].index, copy] = completion
                self.missing[part.group] -= 1
            self.answered[engine].append(part)

    def num_tokens(self, engine: int) -> int:
        """Sampled tokens of an engine."""
        return sum(
            len(self.completions[self.groups[part.group].index, part.first_copy + copy].token_ids)
            for part in self.answered[engine]
            for copy in range(part.num_copies)
        )

    def tokens_in_order(self) -> list[int]:
        """Sampled tokens of each engine, had it been given consecutive rows."""
        rows = [(group.index, copy) for group in self.groups for copy in range(group.num_copies)]
        spans = split_evenly(len(rows), len(self.answered))
        return [sum(len(self.completions[rows[place]].token_ids) for place in span) for span in spans]
