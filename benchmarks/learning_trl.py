"""TRL's side of learning_curves.py: ``trl.GRPOTrainer`` with its own generation, on a command line of ours.

    python -m benchmarks.learning_trl --model FOLDER --dataset FILE --reward-funcs MODULE:FUNCTION --use_vllm False ...

Takes the words that ``colocate_rl.grpo`` takes. They are read into our configuration, and every setting that TRL has
too gets the value from there, the ones nobody named included: where defaults differ, ours hold on both sides. Writes
what TRL logs as ``metrics.jsonl`` into ``--output_dir``, as a run of ours does.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import RunError

DERIVED = ("generation_batch_size",)
"""Follows from the other settings of the batch, on both sides; TRL refuses to be told both."""


def theirs(ours: Any, config_class: type) -> Any:
    """TRL's configuration with the values of ours.

    Args:
        ours: an instance of a dataclass.
        config_class: a dataclass; it gets every field that both have.

    Raises:
        RunError: where a value of ours does not come out as it was given, or :data:`DERIVED` ones differ.
    """
    names = {item.name for item in dataclasses.fields(ours)}
    shared = [item.name for item in dataclasses.fields(config_class) if item.init and item.name in names]
    config = config_class(**{name: getattr(ours, name) for name in shared if name not in DERIVED})
    unequal = [
        f"{name} is {getattr(config, name)!r} there, {getattr(ours, name)!r} here"
        for name in shared
        if getattr(config, name) != getattr(ours, name)
    ]
    if unequal:
        raise RunError(f"TRL would train with other settings, so the curves say nothing: {'; '.join(unequal)}.")
    return config


def train(arguments: Sequence[str]) -> None:
    """Trains once with TRL and writes its figures."""
    from transformers import HfArgumentParser
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    from colocate_rl import GRPOConfig as OurConfig
    from colocate_rl.data import load_rows
    from colocate_rl.grpo import parse_script
    from colocate_rl.report.figures import METRICS_FILE
    from colocate_rl.scoring.names import resolve_reward

    script, rest = parse_script(arguments)
    (ours,) = HfArgumentParser(OurConfig).parse_args_into_dataclasses(rest)  # type: ignore[arg-type]
    ours.model_init_kwargs = {"dtype": script.dtype or "float32"}  # as colocate_rl.grpo does
    trainer = GRPOTrainer(
        model=script.model,
        reward_funcs=[resolve_reward(path) for path in script.reward_funcs],
        args=theirs(ours, GRPOConfig),
        train_dataset=load_rows(script.dataset, "train"),
        eval_dataset=load_rows(script.eval_dataset, "test"),
    )
    trainer.train()
    lines = [json.dumps(record) + "\n" for record in trainer.state.log_history]
    (Path(ours.output_dir) / METRICS_FILE).write_text("".join(lines), "utf-8")


if __name__ == "__main__":
    train(sys.argv[1:])
