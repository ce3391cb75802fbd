"""The generation batch in use, as it travels with checkpoints: a run interrupted inside it goes on with the same rows.

Each rank writes one safetensors file into the checkpoint. It holds the slices that are still to be trained, with their
old and reference log-probabilities; with ``overlap="one_step"`` also the completions of the batch generated ahead, by
weights that no longer exist; and the lengths by which prompts are dealt to engines. Its metadata hold a JSON header,
which says whether another run can take it up. Tensors and JSON only: nothing is unpickled.
"""

import json
import logging
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from colocate_rl.collectives import Collectives
from colocate_rl.config import GRPOConfig
from colocate_rl.rollout.packed import pack_answers, unpack_answers
from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.rollout.sampler import PROMPT_INDEX
from colocate_rl.rollout.stages import Answered, Row

logger = logging.getLogger(__name__)

HEADER = "colocate_rl"
"""Name of the header among the metadata."""
_FORMAT = 1
_DECISIVE = (
    "per_device_train_batch_size",
    "steps_per_generation",
    "num_iterations",
    "gradient_accumulation_steps",
    "num_generations",
    "overlap",
)
"""Settings without which the slices would be others; also whether there is a reference, and whose the old
log-probabilities are, as "auto" has decided it."""

RowsOf = Callable[[int], Sequence[Row] | None]
"""This rank's rows of any generation batch, or None past the last one that the run trains."""


@dataclass(frozen=True, slots=True)
class RolloutState:
    """Where a rank stands between two optimizer steps."""

    micro_step: int
    """Micro-batches trained so far."""
    tokens_per_slice: float
    """Tokens in the loss of a slice, averaged over slices and ranks, as the next loss divides by them."""
    slices: list[RolloutBatch]
    """Of the generation batch in use; none when it is used up."""
    ahead: tuple[int, Answered] | None
    """Number and answers of a generation batch that waits for its turn."""
    lengths: Mapping[int, float]
    """See :attr:`colocate_rl.rollout.handout.ExpectedLengths.known`."""


def file_name(rank: int) -> str:
    """Of a rank's file in a checkpoint."""
    return f"rollout_state_{rank}.safetensors"


def save(folder: Path, state: RolloutState, args: GRPOConfig, collectives: Collectives) -> None:
    """Writes this rank's file into a checkpoint; every rank must call it."""
    tensors = {
        f"slice/{number}/{name}": value
        for number, part in enumerate(state.slices)
        for name, value in _columns(part).items()
    }
    if state.ahead is not None:
        tensors |= {f"ahead/{name}": value for name, value in pack_answers(state.ahead[1]).items()}
    tensors["lengths/prompts"] = torch.tensor(list(state.lengths), dtype=torch.int64)
    tensors["lengths/tokens"] = torch.tensor(list(state.lengths.values()), dtype=torch.float64)
    header = {
        **_identity(args, collectives.world_size, state.micro_step),
        "tokens_per_slice": state.tokens_per_slice,
        "num_slices": len(state.slices),
        "ahead": None if state.ahead is None else state.ahead[0],
        "ahead_prompts": None if state.ahead is None else _digest(state.ahead[1].rows),
    }
    with collectives.failing_together("saving the generation batch in use"):
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / file_name(collectives.rank)
        partial = file.with_suffix(".partial")
        # A file must not hold the same memory twice, and old log-probabilities may be the engine's very own.
        save_file({name: value.clone() for name, value in tensors.items()}, partial, {HEADER: json.dumps(header)})
        os.replace(partial, file)


def load(
    folder: Path, micro_step: int, args: GRPOConfig, collectives: Collectives, rows_of: RowsOf
) -> RolloutState | None:
    """Reads this rank's file of a checkpoint; every rank must call it.

    Args:
        folder: the checkpoint.
        micro_step: where the run resumes.
        args: the run's configuration.
        collectives: of the training ranks.
        rows_of: see :data:`RowsOf`.

    Returns:
        None, with a warning, on all ranks when one of them finds no state that fits this run.
    """
    file = folder / file_name(collectives.rank)
    expected = _identity(args, collectives.world_size, micro_step)
    with collectives.failing_together("reading the generation batch in use"):
        header, tensors = _read(file)
    number = None if header is None else header.get("ahead")
    with collectives.failing_together("reading the prompts of the generation batch ahead"):
        rows = None if number is None else rows_of(number)  # None: there is none, or this run is shorter
    problem = _obstacle(file, header, expected)
    if header is not None and problem is None and rows is not None and header.get("ahead_prompts") != _digest(rows):
        problem = f"its {file.name} answers other prompts than this run (by its data set, seed, data_seed) asks next"
    obstacles = collectives.gather_objects(problem)
    obstacle = next((text for text in obstacles if text), None)
    if header is None or obstacle is not None:
        if collectives.rank == 0:
            logger.warning(
                "Checkpoint %s: %s. A generation batch in use or ahead is generated again by the resumed weights, so "
                "this run will not repeat the unbroken one exactly.",
                folder,
                obstacle,
            )
        return None
    slices = [_batch(_beneath(tensors, f"slice/{number}/")) for number in range(header["num_slices"])]
    ahead = None
    if rows is not None:
        ahead = header["ahead"], unpack_answers(_beneath(tensors, "ahead/"), rows, collectives)
    lengths = zip(tensors["lengths/prompts"].tolist(), tensors["lengths/tokens"].tolist(), strict=True)
    return RolloutState(micro_step, header["tokens_per_slice"], slices, ahead, dict(lengths))


def _identity(args: GRPOConfig, world_size: int, micro_step: int) -> dict[str, Any]:
    """What must be the same in the run that saves and in the one that takes it up."""
    number, position = divmod(micro_step, args.micro_batches_per_rollout)
    return {
        "format": _FORMAT,
        "world_size": world_size,
        "generation_batch": number,
        "position": position,
        **{name: getattr(args, name) for name in _DECISIVE},
        "old_logprobs": args.old_logprobs_source,
        "with_reference": args.beta != 0.0,
    }


def _digest(rows: Sequence[Row]) -> int:
    """Tells prompts and their order apart: answers are kept without rows, which another run may order otherwise."""
    return zlib.crc32(repr([(row[PROMPT_INDEX], row["prompt"]) for row in rows]).encode("utf-8", "surrogatepass"))


def _obstacle(file: Path, header: Mapping[str, Any] | None, expected: Mapping[str, Any]) -> str | None:
    if header is None:
        return f"it has no {file.name}"
    for name, value in expected.items():
        if header.get(name) != value:
            return f"its {file.name} was saved with {name}={header.get(name)!r}, and this run has {value!r}"
    return None


def _read(file: Path) -> tuple[dict[str, Any] | None, dict[str, torch.Tensor]]:
    if not file.is_file():
        return None, {}
    with safe_open(file, "pt") as opened:
        header: dict[str, Any] = json.loads((opened.metadata() or {}).get(HEADER, "{}"))
        return header, {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is no mapping


def _columns(batch: RolloutBatch) -> dict[str, torch.Tensor]:
    columns = {item.name: getattr(batch, item.name) for item in fields(batch)}
    return {name: value for name, value in columns.items() if value is not None}


def _batch(columns: Mapping[str, Any]) -> RolloutBatch:
    return RolloutBatch(**columns)


def _beneath(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
