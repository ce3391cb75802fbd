"""How prompts and completions travel between ranks: as flat tensors, from which every rank makes the same records."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from colocate_rl.collectives import Collectives
from colocate_rl.engine.protocol import FINISH_REASONS, Completion
from colocate_rl.errors import EngineError
from colocate_rl.rollout.handout import Group
from colocate_rl.rollout.records import Prompt

Answer = tuple[int, list[Completion]]
"""Position of a part in its plan, and the completions of its copies."""


def gather_groups(collectives: Collectives, prompts: Sequence[Prompt]) -> tuple[list[Group], list[int]]:
    """Merges all ranks' prompts to groups; every rank must call it.

    Args:
        collectives: of the training ranks.
        prompts: this rank's.

    Returns:
        The groups, and of each local prompt the first copy that belongs to it.

    Raises:
        EngineError: when ranks mean different tokens by one index.
    """
    heads = torch.tensor([[p.index, p.num_copies, len(p.token_ids)] for p in prompts], dtype=torch.int64)
    ids = torch.tensor([token for p in prompts for token in p.token_ids], dtype=torch.int64)
    all_heads = collectives.gather_ragged(heads.view(-1, 3))
    all_ids = collectives.gather_ragged(ids)
    groups: dict[int, Group] = {}
    first_copy: list[int] = []
    for rank, (rank_heads, rank_ids) in enumerate(zip(all_heads, all_ids, strict=True)):
        position = 0
        tokens = rank_ids.tolist()
        for index, copies, length in rank_heads.tolist():
            token_ids = tuple(tokens[position : position + length])
            position += length
            known = groups.get(index)
            if known is not None and known.token_ids != token_ids:
                raise EngineError(f"ranks disagree about the tokens of prompt {index}: {known.token_ids[:8]}...")
            before = 0 if known is None else known.num_copies
            groups[index] = Group(index, token_ids, before + copies)
            if rank == collectives.rank:
                first_copy.append(before)
    return list(groups.values()), first_copy


def gather_answers(
    collectives: Collectives, answers: Sequence[Answer], policy_version: int
) -> list[list[tuple[int, Completion]]]:
    """What each rank's engine has answered; every rank must call it.

    Args:
        collectives: of the training ranks.
        answers: of this rank's engine; none where another shard speaks for it.
        policy_version: of all completions.

    Returns:
        Of each rank, positions in the plan with one completion each.
    """
    flat = [(position, completion) for position, part in answers for completion in part]
    heads = torch.tensor(
        [[position, len(c.token_ids), FINISH_REASONS.index(c.finish_reason)] for position, c in flat],
        dtype=torch.int64,
    )
    gather = collectives.gather_ragged
    all_heads = gather(heads.view(-1, 3))
    if not any(len(rank_heads) for rank_heads in all_heads):
        return [[] for _ in all_heads]
    all_ids = gather(torch.from_numpy(_joined([c.token_ids for _, c in flat], np.int64)))
    all_logprobs = gather(torch.from_numpy(_joined([c.sampling_logprobs for _, c in flat], np.float32)))
    return [list(_cut(*columns, policy_version)) for columns in zip(all_heads, all_ids, all_logprobs, strict=True)]


def _joined(lists: Sequence[Sequence[int] | Sequence[float]], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(values, dtype=dtype) for values in lists]) if lists else np.zeros(0, dtype)


def _cut(
    heads: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor, policy_version: int
) -> Iterator[tuple[int, Completion]]:
    tokens, values = ids.tolist(), logprobs.tolist()
    start = 0
    for position, length, reason in heads.tolist():
        span = slice(start, start + length)
        yield position, Completion(tokens[span], values[span], FINISH_REASONS[reason], policy_version)
        start += length
