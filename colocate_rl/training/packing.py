"""Rows without padding: one behind another in one sequence, and grouped so that a pass holds so many tokens at most.

Rows with the same prompt share it: its tokens stand in the sequence once, in the first of these rows, and the
completions of the others attend to them there. Values and gradients are those of rows that each bring their own prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.training.attention import NAME, REPLACED

SHARE_FROM = 0.02
"""Share of the tokens that must fall away before prompts are shared: gathering the keys costs about one percent."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows of a batch as one sequence of N tokens, positions counted from 0 in each row."""

    input_ids: torch.Tensor
    """int64 [1, N]."""
    position_ids: torch.Tensor
    """int64 [1, N]."""
    starts: torch.Tensor
    """int32 [rows + 1]: where each row's own tokens start, and N."""
    longest: int
    """Most tokens of a row's own."""
    predictors: torch.Tensor
    """int64 [completion tokens]: of each one, row by row, the token of the sequence that comes before it."""
    keys: torch.Tensor | None = None
    """int64 [M]: the tokens that each row attends to, shared prompt included; None where no row borrows any."""
    key_starts: torch.Tensor | None = None
    """int32 [rows + 1]: where each row's keys start, and M."""
    longest_keys: int = 0
    """Most keys of a row."""

    @classmethod
    def of(cls, batch: RolloutBatch) -> "PackedRows":
        """Packs a batch; its masks are prefixes, so tokens keep the order that they have row by row."""
        mask = batch.attention_mask
        owner, prompt = prompt_owners(batch)
        own = mask & (~prompt | (owner == torch.arange(len(owner), device=owner.device))[:, None])
        if int(own.sum()) > (1 - SHARE_FROM) * int(mask.sum()):
            own = mask
        places = own.flatten().cumsum(0).view_as(own) - 1
        places = torch.where(own, places, places[owner])
        positions = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
        counts, key_counts = own.sum(1), mask.sum(1)
        there = counts > 0
        packed = cls(
            batch.input_ids[own][None],
            positions[own][None],
            _starts(counts[there]),
            int(counts.max()),
            places[:, :-1][batch.completion_mask[:, 1:]],
        )
        if own is mask:
            return packed
        keys = places[mask & there[:, None]]
        return replace(
            packed, keys=keys, key_starts=_starts(key_counts[there]), longest_keys=int(key_counts[there].max())
        )

    def num_holders(self) -> torch.Tensor:
        """int64 [N]: how many rows each token of the sequence belongs to; more than one for a shared prompt's."""
        if self.keys is None:
            return torch.ones_like(self.input_ids[0])
        return torch.bincount(self.keys, minlength=self.input_ids.shape[1])

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of a decoder, under transformers' names for packed sequences; ``packed_keys`` is ours.

        The mask is a stand-in: one of four dimensions is handed on as it is, so none of N x N is built, and attention
        that is given row boundaries does not look at it.
        """
        shares = self.keys is not None
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.input_ids.device),
            "cu_seq_lens_q": self.starts,
            "cu_seq_lens_k": self.key_starts if shares else self.starts,
            "max_length_q": self.longest,
            "max_length_k": self.longest_keys if shares else self.longest,
            **({"packed_keys": self.keys} if shares else {}),
        }


def _starts(counts: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def prompt_owners(batch: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows start with the same prompt, token by token.

    Returns:
        int64 [B]: for each row the first row with its prompt; and bool [B, T]: True on prompt tokens.
    """
    prompt = batch.attention_mask & (batch.completion_mask.cumsum(1) == 0)
    tokens = batch.input_ids.masked_fill(~prompt, -1)[:, : int(prompt.sum(1).max())]
    _, group = torch.unique(tokens, dim=0, return_inverse=True)
    rows = torch.arange(len(group), device=group.device)
    first = torch.full_like(rows, len(rows)).scatter_reduce(0, group, rows, "amin")
    return first[group], prompt


def fill(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    padded: bool,
    prompts: Sequence[tuple[int, int]] | None = None,
) -> list[list[int]]:
    """Groups rows, longest first, each into the first group that has room for it.

    Args:
        lengths: tokens of each row.
        max_tokens: most tokens of a group; a longer row is a group of its own.
        padded: whether each row of a group counts as its longest one.
        prompts: of each row, what tells its prompt from others and how many of its tokens are prompt. Rows of one
            prompt are kept together where there is room, and count it once. None: no row shares.

    Returns:
        Row numbers of each group; every row is in exactly one.
    """
    alone = [(-1 - row, 0) for row in range(len(lengths))]
    prompts = alone if prompts is None else prompts
    tallest: dict[int, int] = {}
    for (key, _), length in zip(prompts, lengths, strict=True):
        tallest[key] = max(length, tallest.get(key, 0))
    groups: list[_Group] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-tallest[prompts[row][0]], prompts[row][0], -lengths[row])):
        key, prompt_tokens = prompts[row]
        takers = [group for group in groups if key in group.prompts] + groups
        for group in takers:
            shared = prompt_tokens if key in group.prompts else 0
            added = lengths[group.rows[0]] if padded else lengths[row] - shared
            if group.tokens + added <= max_tokens:
                break
        else:
            group, added = _Group(), lengths[row]
            groups.append(group)
        group.rows.append(row)
        group.prompts.add(key)
        group.tokens += added
    return [sorted(group.rows) for group in groups]


@dataclass(slots=True)
class _Group:
    rows: list[int] = field(default_factory=list)
    prompts: set[int] = field(default_factory=set)
    tokens: int = 0


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
