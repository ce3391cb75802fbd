"""Answers of the engines as tensors, to be written into a checkpoint."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from colocate_rl.collectives import Collectives
from colocate_rl.engine.protocol import FINISH_REASONS, Completion
from colocate_rl.rollout.sampler import PROMPT_INDEX
from colocate_rl.rollout.stages import Answered, Row, numbered_copies


def pack_answers(answered: Answered) -> dict[str, torch.Tensor]:
    """A rank's answers without their rows, which the data set has, and without the engines' records.

    Args:
        answered: by engines, perhaps with the help of tools; a user's own rollout function may add columns of any kind,
            for which there is no place here.
    """
    assert not answered.columns, "a rollout_func never answers ahead of its turn"
    completions = answered.completions
    sampled = [[True] * len(c.token_ids) if c.sampled is None else list(c.sampled) for c in completions]
    further = {
        "texts": answered.texts,
        "figures": dict(answered.figures),
        "places": answered.places,
        "knows_everyone": bool(answered.everyone),
    }
    return {
        **_pack_lists("prompt_ids", answered.prompt_ids, torch.int64),
        **_pack_lists("token_ids", [c.token_ids for c in completions], torch.int64),
        **_pack_lists("logprobs", [c.sampling_logprobs for c in completions], torch.float64),
        **_pack_lists("sampled", sampled, torch.bool),
        "finish_reasons": torch.tensor([FINISH_REASONS.index(c.finish_reason) for c in completions]),
        "policy_versions": torch.tensor([c.policy_version for c in completions], dtype=torch.int64),
        "further": torch.tensor(list(json.dumps(further).encode()), dtype=torch.uint8),
    }


def unpack_answers(tensors: Mapping[str, torch.Tensor], rows: Sequence[Row], collectives: Collectives) -> Answered:
    """What :func:`pack_answers` packed; every rank must call it.

    Args:
        tensors: of this rank.
        rows: this rank's, the same as then.
        collectives: of the training ranks.
    """
    further = json.loads(bytes(tensors["further"].tolist()))
    prompt_ids = [tuple(ids) for ids in _unpack_lists("prompt_ids", tensors)]
    completions = [
        Completion(ids, logprobs, FINISH_REASONS[reason], version, None if all(sampled) else sampled)
        for ids, logprobs, reason, version, sampled in zip(
            _unpack_lists("token_ids", tensors),
            _unpack_lists("logprobs", tensors),
            tensors["finish_reasons"].tolist(),
            tensors["policy_versions"].tolist(),
            _unpack_lists("sampled", tensors),
            strict=True,
        )
    ]
    prompts: dict[int, tuple[int, ...]] = {}
    everyone: dict[tuple[int, int], Completion] = {}
    if further["knows_everyone"]:
        indices = [row[PROMPT_INDEX] for row in rows]
        mine = list(zip(indices, prompt_ids, completions, strict=True))
        everyones = [row for part in collectives.gather_objects(mine) for row in part]
        prompts = {index: ids for index, ids, _ in everyones}
        keys = numbered_copies(index for index, _, _ in everyones)
        everyone = {key: completion for key, (_, _, completion) in zip(keys, everyones, strict=True)}
    return Answered(
        list(rows),
        prompt_ids,
        completions,
        [],
        texts=further["texts"],
        figures={name: (above, below) for name, (above, below) in further["figures"].items()},
        places=further["places"],
        prompts=prompts,
        everyone=everyone,
    )


def _pack_lists(name: str, lists: Sequence[Sequence[Any]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    flat = [value for values in lists for value in values]
    lengths = torch.tensor([len(values) for values in lists], dtype=torch.int64)
    return {name: torch.tensor(flat, dtype=dtype), f"{name}/lengths": lengths}


def _unpack_lists(name: str, tensors: Mapping[str, torch.Tensor]) -> list[list[Any]]:
    parts = tensors[name].split(tensors[f"{name}/lengths"].tolist())
    return [part.tolist() for part in parts]
