"""Attention inside each of the rows that lie one behind another in a packed sequence.

It is registered with transformers under a name of its own (``AttentionInterface``, ``AttentionMaskInterface``: the
library's extension points). A pass that brings no row boundaries is transformers' own ``sdpa``, masks included, so a
model that has it installed still does everything it did before. It stays installed, because gradient checkpointing
calls it a second time, in the backward pass.
"""

import inspect
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

NAME = "colocate_varlen"
REPLACED = "sdpa"

_KNOWN = frozenset(
    {"scaling", "is_causal", "position_ids", "position_embeddings", "cache_position", "packed_keys"}
    | {"output_router_logits"}
    | {f"{name}_{side}" for name in ("cu_seq_lens", "max_length") for side in "qk"}
)
"""Arguments that a packed pass reads or that change nothing in it. Any other one asks for another kind of attention."""
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""The kernel groups heads by itself; newer versions of the function in front of it want to be told."""


class UnsupportedAttentionError(RuntimeError):
    """The model asks its attention for something that a packed pass does not do."""


def install(model: PreTrainedModel) -> None:
    """Makes ``model`` use this attention."""
    AttentionInterface.register(NAME, varlen_attention)
    AttentionMaskInterface.register(NAME, AttentionMaskInterface()[REPLACED])
    model.set_attn_implementation(NAME)


def uninstall(model: PreTrainedModel) -> None:
    """Gives ``model`` back what it had."""
    model.set_attn_implementation(REPLACED)


def check_installed(model: nn.Module) -> None:
    """Refuses a model that would ignore the row boundaries."""
    config: Any = model.config
    assert config._attn_implementation == NAME, config._attn_implementation


def varlen_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of a packed sequence, each token to the earlier ones of its own row.

    Args:
        module: the attention layer.
        query: [1, heads, N, size].
        key: [1, key heads, N, size].
        value: as key.
        attention_mask: read only where there are no row boundaries.
        given: as transformers passes them on: ``scaling`` of the scores, ``cu_seq_lens_q`` int32 [rows + 1] (where each
            row starts, and N; None: no packed pass), ``max_length_q`` (tokens of the longest row), the same of the keys
            under ``_k``, and ``packed_keys`` int64 [M]: which token each key is, where rows share prompts.

    Returns:
        [1, N, heads, size], and no attention weights.

    Raises:
        UnsupportedAttentionError: when the layer wants more than causal attention inside each row.
    """
    cumulated = given.get("cu_seq_lens_q")
    if cumulated is None:
        usual: tuple[torch.Tensor, None] = AttentionInterface()[REPLACED](
            module, query, key, value, attention_mask, **given
        )
        return usual
    _check_packed(module, query, given)
    keys = given.get("packed_keys")
    if keys is not None:
        key, value = _gathered(key, keys), _gathered(value, keys)
    rows = Rows(cumulated, given["cu_seq_lens_k"], given["max_length_q"], given["max_length_k"])
    scaling = given.get("scaling")
    return (by_kernel if _kernel_takes(query, value) else by_rows)(query, key, value, rows, scaling), None


def _gathered(states: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The chosen tokens of [1, heads, N, size]; gradients of a token that several rows use are summed in float32.

    In 16 bits the sum would not only round: a GPU adds 16-bit numbers into one place several times slower.
    """
    return states.float().index_select(2, keys).to(states.dtype)


def _check_packed(module: nn.Module, query: torch.Tensor, given: dict[str, Any]) -> None:
    wanted = [
        name
        for name, asked in given.items()
        if name not in _KNOWN and asked is not None and not (isinstance(asked, bool | int | float) and not asked)
    ]
    causal = given.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    if wanted or not causal or query.shape[0] != 1:
        raise UnsupportedAttentionError(
            f"{type(module).__name__} asks for {', '.join(sorted(wanted)) or 'nothing further'}, causal={causal}, on "
            f"{query.shape[0]} sequence(s)"
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of a packed sequence lie."""

    starts: torch.Tensor
    """int32 [rows + 1]: where each row's queries start, and how many there are in all."""
    key_starts: torch.Tensor
    """int32 [rows + 1]: the same of its keys; a row's queries are its last tokens."""
    longest: int
    """Most queries of a row."""
    longest_keys: int
    """Most keys of a row."""


def by_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: Rows, scaling: float | None
) -> torch.Tensor:
    """All rows in one launch of the Flash Attention kernel that torch brings along; CUDA, 16 bits."""
    dtype = _compute_dtype(query)
    q, k, v = (states[0].transpose(0, 1).to(dtype) for states in (query, key, value))
    further: Any = {"scale": scaling, "window_size": (-1, 0), **_GROUPED}
    output: Any = varlen_attn(q, k, v, rows.starts, rows.key_starts, rows.longest, rows.longest_keys, **further)
    return cast(torch.Tensor, output[None])


def by_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: Rows, scaling: float | None
) -> torch.Tensor:
    """Row after row through torch's own attention: exact everywhere, and no mask of N x N."""
    queries, keys = rows.starts.diff().tolist(), rows.key_starts.diff().tolist()
    grouped = query.shape[1] != key.shape[1]
    outputs = [
        nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2]), scale=scaling, enable_gqa=grouped
        )
        for q, k, v in zip(query.split(queries, 2), key.split(keys, 2), value.split(keys, 2), strict=True)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _compute_dtype(query: torch.Tensor) -> torch.dtype:
    """Under autocast rotations come out in float32; attention is computed in autocast's type all the same."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def _kernel_takes(query: torch.Tensor, value: torch.Tensor) -> bool:
    size = query.shape[-1]
    return (
        query.device.type == "cuda"
        and _compute_dtype(query) in (torch.bfloat16, torch.float16)
        and size == value.shape[-1]
        and size <= 256
        and size % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )
