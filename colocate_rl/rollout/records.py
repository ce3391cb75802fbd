"""The typed records that a rollout passes on. Shape letters: B rows of this rank, T padded tokens, G group size.

One convention for every [B, T] tensor: column t holds the fact *about token t given the tokens before it*; column 0 is
therefore never used. Rows are padded on the right only, so positions need no repair, and masks come from lengths, never
from comparing with a pad id.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from colocate_rl.engine.protocol import Completion, Span


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of this rank and how many completions of it this rank wants."""

    index: int
    """Which prompt this is within the generation batch: rows with the same index form a group, whatever their text."""
    token_ids: tuple[int, ...]
    num_copies: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What one engine did in one call."""

    engine: int
    num_prompts: int
    num_tokens: int
    """Sampled tokens."""
    seconds: float
    spans: tuple[Span, ...] = ()
    """When it generated."""
    num_tokens_in_order: int = 0
    """What it would have sampled, had groups been cut into slices as they came instead of dealt."""


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """Rows ready for the loss."""

    input_ids: torch.Tensor
    """int64 [B, T]: prompt, completion, right padding."""
    attention_mask: torch.Tensor
    """bool [B, T]: True on prompt and completion."""
    completion_mask: torch.Tensor
    """bool [B, T]: True on tokens that an engine sampled, so not on what tools wrote in between."""
    loss_mask: torch.Tensor
    """bool [B, T]: completion_mask without rows left out of the loss (mask_truncated_completions)."""
    sampling_logprobs: torch.Tensor
    """float32 [B, T]: by the engine; 0 outside completion_mask."""
    advantages: torch.Tensor
    """float32 [B]."""
    old_logprobs: torch.Tensor | None = None
    """float32 [B, T]: by the policy at rollout time; None where they equal the live ones."""
    ref_logprobs: torch.Tensor | None = None
    """float32 [B, T]: by the reference model."""

    def __post_init__(self) -> None:
        rows_by_tokens = self.input_ids.shape
        for item in fields(self):
            value = getattr(self, item.name)
            expected = rows_by_tokens[:1] if item.name == "advantages" else rows_by_tokens
            assert value is None or value.shape == expected, (item.name, value.shape, expected)
        assert self.input_ids.dtype == torch.int64
        assert self.loss_mask.dtype == self.completion_mask.dtype == self.attention_mask.dtype == torch.bool

    @classmethod
    def from_rows(
        cls,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Completion],
        advantages: torch.Tensor,
        *,
        keep: Sequence[bool],
        pad_token_id: int,
    ) -> "RolloutBatch":
        """Pads ragged rows.

        Args:
            prompts: token ids of each row's prompt.
            completions: each row's completion.
            advantages: float32 [B].
            keep: False leaves a row out of the loss.
            pad_token_id: any valid id; it is never read.
        """
        lengths = [len(p) + len(c.token_ids) for p, c in zip(prompts, completions, strict=True)]
        shape = (len(lengths), max(lengths, default=0))
        input_ids = torch.full(shape, pad_token_id, dtype=torch.int64)
        attention_mask = torch.zeros(shape, dtype=torch.bool)
        completion_mask = torch.zeros(shape, dtype=torch.bool)
        sampling_logprobs = torch.zeros(shape, dtype=torch.float32)
        for row, (prompt, completion, length) in enumerate(zip(prompts, completions, lengths, strict=True)):
            start = len(prompt)
            input_ids[row, :length] = torch.tensor([*prompt, *completion.token_ids], dtype=torch.int64)
            attention_mask[row, :length] = True
            sampled = True if completion.sampled is None else torch.tensor(completion.sampled, dtype=torch.bool)
            completion_mask[row, start:length] = sampled
            sampling_logprobs[row, start:length] = torch.tensor(completion.sampling_logprobs, dtype=torch.float32)
        kept = torch.tensor(list(keep), dtype=torch.bool)[:, None]
        return cls(
            input_ids=input_ids,
            attention_mask=attention_mask,
            completion_mask=completion_mask,
            loss_mask=completion_mask & kept,
            sampling_logprobs=sampling_logprobs,
            advantages=advantages.to(torch.float32),
        )

    @classmethod
    def joined(cls, batches: Sequence["RolloutBatch"]) -> "RolloutBatch":
        """The rows of several batches, one batch after the other; what one of them lacks, all must lack."""
        width = max(batch.input_ids.shape[1] for batch in batches)
        columns: dict[str, Any] = {}
        for item in fields(cls):
            values = [getattr(batch, item.name) for batch in batches]
            if values[0] is not None and values[0].ndim == 2:
                values = [torch.nn.functional.pad(value, (0, width - value.shape[1])) for value in values]
            columns[item.name] = None if values[0] is None else torch.cat(values)
        return cls(**columns)

    @property
    def num_rows(self) -> int:
        """B."""
        return self.input_ids.shape[0]

    def rows(self, chosen: Sequence[int]) -> "RolloutBatch":
        """The chosen rows, cut to the longest of them."""
        index = torch.tensor(list(chosen), dtype=torch.int64, device=self.input_ids.device)
        picked = {item.name: getattr(self, item.name) for item in fields(self)}
        picked = {name: None if value is None else value[index] for name, value in picked.items()}
        width = int(picked["attention_mask"].sum(1).max()) if len(chosen) else 0
        cut: dict[str, Any] = {
            name: v if v is None or v.ndim == 1 else v[:, :width].contiguous() for name, v in picked.items()
        }
        return RolloutBatch(**cut)

    def split(self, parts: int) -> list["RolloutBatch"]:
        """Equal consecutive parts; the number of rows must be a multiple of ``parts``."""
        size = self.num_rows // parts
        assert size * parts == self.num_rows, (self.num_rows, parts)
        return [self.rows(range(part * size, (part + 1) * size)) for part in range(parts)]

    def to(self, device: torch.device) -> "RolloutBatch":
        """The same batch on ``device``."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        moved: dict[str, Any] = {n: None if v is None else v.to(device, non_blocking=True) for n, v in values.items()}
        return RolloutBatch(**moved)

    def with_logprobs(
        self, *, old_logprobs: torch.Tensor | None = None, ref_logprobs: torch.Tensor | None = None
    ) -> "RolloutBatch":
        """A copy with old or reference log-probabilities filled in; None leaves what is there."""
        changes = {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
        return replace(self, **{name: value for name, value in changes.items() if value is not None})
