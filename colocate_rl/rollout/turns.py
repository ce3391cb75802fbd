"""Completions of several turns: generate, run the tools that were called, go on behind their answers.

All ranks go through the rounds together: a round is one call of the engines for the rows of all ranks that still have
something to say, and it ends for all when no rank has any.
"""

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from colocate_rl.collectives import Collectives
from colocate_rl.engine.protocol import Completion, FinishReason, SamplingSpec
from colocate_rl.rollout.dialogue import Message, ToolFormat, calls_of
from colocate_rl.rollout.generate import Generator
from colocate_rl.rollout.prompts import PromptCodec
from colocate_rl.rollout.records import EngineStats, Prompt
from colocate_rl.rollout.sampler import PROMPT_INDEX
from colocate_rl.rollout.stages import Answered, Asked
from colocate_rl.rollout.tools import ToolBox, ToolResult

COPY_BITS = 20
"""A row on its own is named by its prompt's index and its copy; there are fewer copies than 2**20."""


@dataclass(slots=True)
class _Dialogue:
    """One row as it grows."""

    index: int
    """Unique among all rows of all ranks."""
    prompt_ids: tuple[int, ...]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    messages: list[Message]
    sampled: list[bool] = field(default_factory=list)
    num_calls: int = 0
    num_failures: int = 0

    def room(self, limit: int, window: int | None) -> int:
        """New tokens that may still follow."""
        rooms = [limit - len(self.token_ids)]
        if window is not None:
            rooms.append(window - len(self.prompt_ids) - len(self.token_ids))
        return min(rooms)

    def append(self, token_ids: Sequence[int], logprobs: Sequence[float], *, sampled: bool) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.sampled += [sampled] * len(token_ids)


class ToolLoop:
    """Goes on with completions until they call no more tools.

    Args:
        codec: reads messages out of tokens.
        toolbox: runs the tools.
        tool_format: writes their answers as tokens.
        generator: reaches all engines.
        collectives: of the training ranks.
        sampling: of every turn; ``max_tokens`` is for all turns and tools' answers of a completion together.
        window: context window in tokens; None: no limit.
        max_iterations: most times that a completion goes on; None: as often as it wants to.
    """

    def __init__(
        self,
        codec: PromptCodec,
        toolbox: ToolBox,
        tool_format: ToolFormat,
        generator: Generator,
        collectives: Collectives,
        sampling: SamplingSpec,
        *,
        window: int | None,
        max_iterations: int | None,
    ) -> None:
        self._codec = codec
        self._toolbox = toolbox
        self._format = tool_format
        self._generator = generator
        self._collectives = collectives
        self._sampling = sampling
        self._window = window
        self._max_iterations = max_iterations

    def __call__(self, asked: Asked) -> Answered:
        """The rows with all their turns; every rank must call it.

        A turn that was cut off calls nothing. Where the answers of a turn's tools, and one token more, no longer fit,
        they are dropped and the completion ends with that turn.
        """
        answered = asked.answered
        with self._collectives.failing_together("reading tool calls"):
            dialogues = self._begin(asked)
        stats = list(answered.stats)
        waiting = dialogues
        rounds = itertools.count() if self._max_iterations is None else range(self._max_iterations)
        for number in rounds:
            with self._collectives.failing_together("calling tools"):
                waiting = self._answer_calls(waiting)
            room = max((self._room(dialogue) for dialogue in waiting), default=0)
            longest = int(self._collectives.max(torch.tensor([room])))
            if longest == 0:
                break
            stats += self._go_on(waiting, longest, asked.policy_version, _turn_seed(asked.seed, number))
        num_calls = sum(dialogue.num_calls for dialogue in dialogues)
        return replace(
            answered,
            completions=[_completion(dialogue, asked.policy_version) for dialogue in dialogues],
            texts=[dialogue.messages for dialogue in dialogues],
            stats=stats,
            figures={
                "tools/call_frequency": (num_calls, len(dialogues)),
                "tools/failure_frequency": (sum(dialogue.num_failures for dialogue in dialogues), num_calls),
            },
            prompts={},
            everyone={},  # of first turns; other ranks' dialogues are not known here
        )

    def _begin(self, asked: Asked) -> list[_Dialogue]:
        answered = asked.answered
        dialogues = []
        for row, ids, c, copy in zip(
            answered.rows, answered.prompt_ids, answered.completions, asked.copies, strict=True
        ):
            index = row[PROMPT_INDEX] << COPY_BITS | copy
            dialogue = _Dialogue(index, ids, [], [], c.finish_reason, [self._codec.message(c.token_ids, ids)])
            dialogue.append(c.token_ids, c.sampling_logprobs, sampled=True)
            dialogues.append(dialogue)
        return dialogues

    def _room(self, dialogue: _Dialogue) -> int:
        return dialogue.room(self._sampling.max_tokens, self._window)

    def _answer_calls(self, dialogues: Sequence[_Dialogue]) -> list[_Dialogue]:
        """Runs the tools that the last turns call; the dialogues that go on, with the answers at their end."""
        calling = [d for d in dialogues if d.finish_reason == "stop" and calls_of(d.messages[-1])]
        results = self._toolbox.call([calls_of(dialogue.messages[-1]) for dialogue in calling])
        return [d for d, answers in zip(calling, results, strict=True) if self._append_answers(d, answers)]

    def _append_answers(self, dialogue: _Dialogue, answers: Sequence[ToolResult]) -> bool:
        """Whether they fit."""
        dialogue.num_calls += len(answers)
        dialogue.num_failures += sum(answer.failed for answer in answers)
        suffix = self._format.suffix(answers)
        if self._room(dialogue) <= len(suffix):
            return False
        dialogue.append(suffix, [0.0] * len(suffix), sampled=False)
        dialogue.messages += [answer.message() for answer in answers]
        return True

    def _go_on(
        self, dialogues: Sequence[_Dialogue], longest: int, policy_version: int, seed: int | None
    ) -> list[EngineStats]:
        """One more turn of this rank's dialogues; a row with less room than the longest is cut to its own."""
        prompts = [Prompt(d.index, (*d.prompt_ids, *d.token_ids), 1) for d in dialogues]
        sampling = replace(self._sampling, max_tokens=longest)
        with self._generator.other_prompts():
            answers, stats = self._generator.generate(prompts, sampling, seed, policy_version)
        with self._collectives.failing_together("reading tool calls"):
            for dialogue, prompt, (answer,) in zip(dialogues, prompts, answers, strict=True):
                room = self._room(dialogue)
                ids = answer.token_ids[:room]
                dialogue.append(ids, answer.sampling_logprobs[:room], sampled=True)
                dialogue.finish_reason = answer.finish_reason if len(ids) == len(answer.token_ids) else "length"
                dialogue.messages.append(self._codec.message(ids, prompt.token_ids))
        return stats


def _turn_seed(seed: int | None, turn: int) -> int | None:
    return None if seed is None else zlib.crc32(f"{seed}/turn {turn}".encode())


def _completion(dialogue: _Dialogue, policy_version: int) -> Completion:
    whole: Any = None if all(dialogue.sampled) else dialogue.sampled
    return Completion(dialogue.token_ids, dialogue.logprobs, dialogue.finish_reason, policy_version, whole)
