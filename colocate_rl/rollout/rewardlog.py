"""What reward functions may log: figures and columns of the completions table, under names that are still free."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from colocate_rl.metrics import MetricBuffer

RESERVED_METRICS = re.compile(
    r"(loss|grad_norm|learning_rate|epoch|step|step_time|num_tokens|kl|entropy|reward|reward_std|frac_reward_zero_std|"
    r"staleness|policy_loss|entropy_coef|aux_loss|cispo_clip_ratio)$|"
    r"(balance|completions|prompts|rank|rewards|engine|time|dynamic_sampling|clip_ratio|policy_ratio|sampling|tools|vespo)/|eval_"
)
"""Names of the trainer's own figures."""


def metric_logger(metrics: MetricBuffer) -> Callable[[str, float], None]:
    """The ``log_metric`` of reward functions.

    Args:
        metrics: receives the mean of what is logged under a name.
    """

    def log_metric(name: str, value: float) -> None:
        if RESERVED_METRICS.match(name):
            raise ValueError(f"log_metric({name!r}): the trainer logs a figure of that name itself. Use another one.")
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):  # torch has its own idea of several numbers in place of one
            raise ValueError(f"log_metric({name!r}) got {value!r}. It takes one number.") from None
        metrics.mean(name, number)

    return log_metric


def extra_logger(extras: dict[str, list[Any]], expected: int) -> Callable[[str, Sequence[Any]], None]:
    """The ``log_extra`` of reward functions.

    Args:
        extras: receives the columns.
        expected: values that a column must have, one per completion.
    """

    def log_extra(column: str, values: Sequence[Any]) -> None:
        if column in ("step", "prompt", "completion", "advantage"):
            raise ValueError(f"log_extra({column!r}): the table has a column of that name itself. Use another one.")
        if len(values) != expected:
            raise ValueError(f"log_extra({column!r}) got {len(values)} value(s) for {expected} completions.")
        extras[column] = list(values)

    return log_extra
