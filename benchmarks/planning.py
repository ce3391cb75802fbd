"""Which split to choose: a fit of measured splits, and what it says about others. Pure arithmetic.

A step that generates, then trains, takes A + G/K + B + R/(N-K) + rest seconds on N GPUs with K engines: G and R are
GPU-seconds of generation and training, A and B the parts that more GPUs do not shorten (a completion's own length, the
optimizer), rest the scoring and the weight sync. Without A and B the best K is N sqrt(G) / (sqrt(G) + sqrt(R)), and
K cannot exceed N/2, because each engine lives inside a training rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Law:
    """seconds = fixed + per_gpu / number of GPUs."""

    fixed: float
    per_gpu: float

    def seconds(self, count: int) -> float:
        """Seconds with ``count`` GPUs."""
        return self.fixed + self.per_gpu / count

    @classmethod
    def fit(cls, points: Sequence[tuple[int, float]]) -> "Law":
        """Least squares with neither part negative; with one number of GPUs everything is taken to scale."""
        inverse = [1 / count for count, _ in points]
        seconds = [value for _, value in points]
        scaled = sum(x * y for x, y in zip(inverse, seconds, strict=True)) / sum(x * x for x in inverse)
        if len({count for count, _ in points}) < 2:
            return cls(0.0, scaled)
        x0, y0 = sum(inverse) / len(points), sum(seconds) / len(points)
        slope = sum((x - x0) * (y - y0) for x, y in zip(inverse, seconds, strict=True))
        slope /= sum((x - x0) ** 2 for x in inverse)
        if slope < 0:
            return cls(y0, 0.0)
        fixed = y0 - slope * x0
        return cls(fixed, slope) if fixed >= 0 else cls(0.0, scaled)


def can_be_fitted(row: dict[str, Any]) -> bool:
    """True for a synchronous run of this library whose two sides do not share devices."""
    alone = row["splits_devices"] or not row["on_gpu"]
    return row["system"] == "colocate_rl" and row["overlap"] == "none" and alone and row["error"] is None


@dataclass(frozen=True)
class Plan:
    """What the fit says."""

    generation: Law
    training: Law
    rest_s: float
    """Scoring and weight sync."""

    @classmethod
    def fit(cls, rows: Sequence[dict[str, Any]]) -> "Plan | None":
        """From rows of this library whose engines have devices of their own (or cores, on CPU); None without any."""
        usable = [row for row in rows if can_be_fitted(row)]
        if not usable:
            return None
        return cls(
            Law.fit([(row["num_vllm_gpus"], row["generate_s"]) for row in usable]),
            Law.fit([(row["num_processes"], row["train_s"]) for row in usable]),
            sum(row["score_s"] + row["sync_s"] for row in usable) / len(usable),
        )

    def step_s(self, num_devices: int, num_engines: int) -> float:
        """Predicted seconds per step."""
        trained = self.training.seconds(num_devices - num_engines)
        return self.generation.seconds(num_engines) + trained + self.rest_s

    def best(self, num_devices: int) -> int:
        """The K with the shortest predicted step."""
        return min(range(1, num_devices // 2 + 1), key=lambda engines: self.step_s(num_devices, engines))

    def formula(self, num_devices: int) -> float:
        """N sqrt(G) / (sqrt(G) + sqrt(R)): the best K if everything scaled and K were free."""
        roots = math.sqrt(self.generation.per_gpu), math.sqrt(self.training.per_gpu)
        return num_devices * roots[0] / sum(roots) if sum(roots) else 1.0

    def as_json(self, num_devices: int) -> dict[str, Any]:
        """Everything :meth:`sentences` says, as numbers."""
        known = num_devices >= 2
        return {
            "num_devices": num_devices,
            "generation_gpu_s": self.generation.per_gpu,
            "generation_fixed_s": self.generation.fixed,
            "training_gpu_s": self.training.per_gpu,
            "training_fixed_s": self.training.fixed,
            "rest_s": self.rest_s,
            "formula_k": self.formula(num_devices),
            "best_k": self.best(num_devices) if known else None,
            "predicted_step_s": {
                str(engines): self.step_s(num_devices, engines) for engines in range(1, num_devices // 2 + 1)
            },
        }

    def sentences(self, num_devices: int, num_measured: int) -> list[str]:
        """The choice for ``num_devices`` GPUs and its reasons, in words."""
        generation, training = self.generation, self.training
        lines = [
            f"Fit of {num_measured} split(s): generate {generation.fixed:.3g} s + {generation.per_gpu:.3g} GPU-s / K, "
            f"train {training.fixed:.3g} s + {training.per_gpu:.3g} GPU-s / (N-K), scoring and weight sync "
            f"{self.rest_s:.2g} s.",
        ]
        if num_measured == 1:
            lines.append("One split tells nothing about the parts that do not scale; measure a second K to see them.")
        if num_devices < 2:
            return lines
        most, free = num_devices // 2, self.formula(num_devices)
        steps = {engines: self.step_s(num_devices, engines) for engines in range(1, most + 1)}
        predicted = ", ".join(f"{seconds:.3g} s with K={engines}" for engines, seconds in steps.items())
        lines.append(f"On {num_devices} devices choose K={self.best(num_devices)}: predicted {predicted}.")
        if not generation.per_gpu or not training.per_gpu:
            side = "train" if generation.per_gpu else "generate"
            return [
                *lines,
                f"More GPUs did not shorten the time to {side} in these runs, so they are better used otherwise.",
            ]
        reason = f"If everything scaled, the best K would be N sqrt(G)/(sqrt(G)+sqrt(R)) = {free:.1f}"
        if most == 1 or free > most:
            reason += f"; K is at most {most} here, because each engine lives inside a training rank"
        lines.append(reason + ".")
        return lines
