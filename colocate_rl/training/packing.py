"""Rows without padding: one behind another in one sequence, and grouped so that a pass holds so many tokens at most."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.training.attention import NAME, REPLACED


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows of a batch as one sequence of N tokens, positions counted from 0 in each row."""

    input_ids: torch.Tensor
    """int64 [1, N]."""
    position_ids: torch.Tensor
    """int64 [1, N]."""
    cumulated: torch.Tensor
    """int32 [rows + 1]: where each row starts, and N."""
    longest: int
    """Tokens of the longest row."""
    predicts: torch.Tensor
    """bool [N]: True where the next token is a completion token of the same row."""

    @classmethod
    def of(cls, batch: RolloutBatch) -> "PackedRows":
        """Packs a batch; its masks are prefixes, so tokens keep the order that they have row by row."""
        kept = batch.attention_mask
        lengths = kept.sum(1)
        cumulated = torch.nn.functional.pad(lengths[lengths > 0].cumsum(0), (1, 0)).to(torch.int32)
        positions = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
        predicts = torch.zeros_like(kept)
        predicts[:, :-1] = batch.completion_mask[:, 1:]
        return cls(batch.input_ids[kept][None], positions[kept][None], cumulated, int(lengths.max()), predicts[kept])

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of a decoder, under transformers' names for packed sequences.

        The mask is a stand-in: one of four dimensions is handed on as it is, so none of N x N is built, and attention
        that is given row boundaries does not look at it.
        """
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.input_ids.device),
            "cu_seq_lens_q": self.cumulated,
            "cu_seq_lens_k": self.cumulated,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
        }


def fill(lengths: Sequence[int], max_tokens: int, *, padded: bool) -> list[list[int]]:
    """Groups rows, longest first, each into the first group that still has room for it.

    Args:
        lengths: tokens of each row.
        max_tokens: most tokens of a group; a longer row is a group of its own.
        padded: whether each row of a group counts as its longest one.

    Returns:
        Row numbers of each group; every row is in exactly one.
    """
    groups: list[list[int]] = []
    totals: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        for number, group in enumerate(groups):
            added = lengths[group[0]] if padded else lengths[row]
            if totals[number] + added <= max_tokens:
                group.append(row)
                totals[number] += added
                break
        else:
            groups.append([row])
            totals.append(lengths[row])
    return [sorted(group) for group in groups]


def obstacle(model: PreTrainedModel) -> str | None:
    """Why ``model`` cannot run without padding, as far as its class and configuration tell; None: nothing known.

    Only what is known to be plain causal attention inside a row passes; the rest keeps its padding.
    """
    config: Any = model.config
    layers = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) if layers is None else None
    known: tuple[tuple[bool, str], ...] = (
        (
            config._attn_implementation not in (REPLACED, NAME),
            f"its attention implementation is {config._attn_implementation!r}, not {REPLACED!r}",
        ),
        (
            not (model._supports_attention_backend and model._supports_sdpa),
            "its class does not take attention functions from outside",
        ),
        (bool(config.sub_configs), "it has models inside the model"),
        (layers is not None and set(layers) != {"full_attention"}, f"it has layers of types {set(layers or ())}"),
        (window is not None, f"it has a sliding window of {window} tokens"),
        (bool(getattr(config, "attn_logit_softcapping", None)), "it caps attention scores"),
        (bool(getattr(config, "attention_chunk_size", None)), "it attends in chunks"),
        (bool(getattr(config, "attention_dropout", None)), "it drops attention weights out (attention_dropout)"),
    )
    return next((reason for found, reason in known if found), None)
