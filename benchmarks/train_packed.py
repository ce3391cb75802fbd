"""Training passes over rows of very different lengths: padded, packed, and packed with compiled layers.

    python benchmarks/train_packed.py                          # on the first GPU, or a small model on CPU
    python benchmarks/train_packed.py --tokens 36864 --repeats 1 --gradient-checkpointing

Forward and backward passes of the loss over the same rows, whose lengths are drawn log-uniformly; every way accumulates
the same gradient. Micro-batches hold either a number of rows in random order, or as many rows as fit a number of
tokens (by default what the padded rows take at most, so that the ways may use the same memory). Further, the peak
memory of a single packed micro-batch. Writes results.json into --output.
"""

import argparse
import contextlib
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.results import console_of
from benchmarks.work import SHAPES, shape_config, write_json
from colocate_rl.engine.protocol import Completion
from colocate_rl.metrics import MetricBuffer
from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.training import attention, compiling, selfcheck
from colocate_rl.training.losses import LossSettings
from colocate_rl.training.objective import Objective

GIB = 1 << 30


@dataclass(frozen=True)
class Way:
    """How rows are put together."""

    name: str
    packed: bool
    rows: int | None
    """Rows of a micro-batch, in random order."""
    max_tokens: int | None
    """Or its most tokens."""
    compiled: bool = False
    """Layers and head run compiled."""


@dataclass(frozen=True)
class Result:
    """One measured way."""

    name: str
    passes: int
    computed_tokens: int
    """Tokens that went through the model, padding included."""
    seconds: float
    tokens_per_s: float
    """Tokens of the rows, without padding."""
    peak_gib: float | None
    """Highest memory in use, with weights and gradients; None on CPU."""
    loss: float
    speed_up: float
    """Over the first way."""


def draw_lengths(total: int, shortest: int, longest: int, seed: int) -> list[int]:
    """Log-uniform lengths until there are ``total`` tokens."""
    source, lengths = random.Random(seed), list[int]()
    while sum(lengths) < total:
        lengths.append(round(math.exp(source.uniform(math.log(shortest), math.log(longest)))))
    return lengths


def make_batch(lengths: list[int], vocab: int, seed: int) -> RolloutBatch:
    """Rows whose first quarter is a prompt."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]
    starts = [max(1, length // 4) for length in lengths]
    completions = [
        Completion(row[start:], [-math.log(vocab)] * (len(row) - start), "stop")
        for row, start in zip(rows, starts, strict=True)
    ]
    return RolloutBatch.from_rows(
        [row[:start] for row, start in zip(rows, starts, strict=True)],
        completions,
        torch.randn(len(rows), generator=generator),
        keep=[True] * len(rows),
        pad_token_id=0,
    )


@contextlib.contextmanager
def at_once() -> Iterator[Callable[[torch.Tensor], None]]:
    """Backward passes of micro-batches before the last; one process has nothing to hold back."""
    yield lambda loss: loss.backward()


class Bench:
    """A model, its rows, and how to run them.

    Args:
        options: the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        dtype = getattr(torch, options.dtype)
        torch.manual_seed(options.seed)
        with self.device:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(shape_config(options.model), dtype=dtype)
        attention.install(model)
        self.model = model
        self.exact = dtype == torch.float32
        self.agreement = selfcheck.compare(model, self.objective(packed=False), self.objective(packed=True))
        self.checkpointing(options.gradient_checkpointing)

    def checkpointing(self, on: bool) -> None:
        """Whether activations are computed a second time in the backward pass."""
        self.model.train(on)
        if on:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.model.gradient_checkpointing_disable()

    def objective(self, *, packed: bool, max_tokens: int | None = None, compiled: bool = False) -> Objective:
        """The objective that the trainer would use."""
        return Objective(
            LossSettings(correction=False),
            1.0,
            self.options.chunk,
            contextlib.nullcontext,
            packed=packed,
            max_tokens=max_tokens,
            compiled=compiled,
        )

    def slices(self, batch: RolloutBatch, way: Way) -> list[RolloutBatch]:
        """All rows at once where tokens are counted, else so many rows each."""
        if way.rows is None:
            return [batch]
        order = list(range(batch.num_rows))
        random.Random(self.options.seed).shuffle(order)
        return [batch.rows(order[start : start + way.rows]) for start in range(0, len(order), way.rows)]

    def run(self, batch: RolloutBatch, way: Way) -> float:
        """Forward and backward passes over all rows; the loss."""
        objective = self.objective(packed=way.packed, max_tokens=way.max_tokens, compiled=way.compiled)
        tokens = float(batch.loss_mask.sum())
        losses = []
        for part in self.slices(batch, way):
            loss, _ = objective.loss(self.model, self.model, part.to(self.device), tokens, MetricBuffer(), at_once)
            loss.backward()
            losses.append(loss.detach())
        return float(torch.stack(losses).sum())

    def shape(self, batch: RolloutBatch, way: Way) -> tuple[int, int]:
        """Micro-batches, and tokens that they compute."""
        objective = self.objective(packed=way.packed, max_tokens=way.max_tokens)
        passes = computed = 0
        for part in self.slices(batch, way):
            for rows in objective.micro_batches(part):
                lengths = [int(part.attention_mask[row].sum()) for row in rows]
                passes += 1
                computed += sum(lengths) if way.packed else max(lengths) * len(lengths)
        return passes, computed

    def measure(self, batch: RolloutBatch, way: Way, first: Result | None) -> Result:
        """Times a way after one run of it that is not counted."""
        if way.compiled:
            compiling.install(self.model)
        self.run(batch, way)
        seconds, loss = [], math.nan
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        for _ in range(self.options.repeats):
            self.model.zero_grad(set_to_none=False)
            self.synchronize()
            start = time.perf_counter()
            loss = self.run(batch, way)
            self.synchronize()
            seconds.append(time.perf_counter() - start)
        compiling.uninstall(self.model)
        median = statistics.median(seconds)
        passes, computed = self.shape(batch, way)
        return Result(
            name=way.name,
            passes=passes,
            computed_tokens=computed,
            seconds=median,
            tokens_per_s=int(batch.attention_mask.sum()) / median,
            peak_gib=self.peak_gib(),
            loss=loss,
            speed_up=first.seconds / median if first else 1.0,
        )

    def one_micro_batch(self, tokens: int) -> dict[str, Any]:
        """Peak memory and seconds of a single packed micro-batch, with gradient checkpointing; None: does not fit."""
        lengths = draw_lengths(tokens, self.options.shortest, self.options.longest, self.options.seed + 1)
        lengths[-1] -= sum(lengths) - tokens
        batch = make_batch([length for length in lengths if length > 1], self.vocab, self.options.seed)
        way = Way("one micro-batch", True, None, None)
        self.checkpointing(True)
        found: dict[str, Any] = {"tokens": int(batch.attention_mask.sum()), "peak_gib": None, "seconds": None}
        with contextlib.suppress(torch.OutOfMemoryError):
            self.run(batch, way)
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            self.model.zero_grad(set_to_none=False)
            self.synchronize()
            start = time.perf_counter()
            self.run(batch, way)
            self.synchronize()
            found |= {"peak_gib": self.peak_gib(), "seconds": time.perf_counter() - start}
        self.checkpointing(self.options.gradient_checkpointing)
        return found

    @property
    def vocab(self) -> int:
        """Of the model."""
        return int(self.model.config.vocab_size)

    def peak_gib(self) -> float | None:
        """Highest memory in use since it was last reset."""
        return torch.cuda.max_memory_allocated(self.device) / GIB if self.device.type == "cuda" else None

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def print_results(results: list[Result], title: str, tokens: int) -> None:
    """Prints one line per way."""
    table = Table(title=title)
    names = ("micro-batches", "passes", "padding", "seconds", "tokens/s", "speed-up", "peak memory", "loss")
    for name in names:
        table.add_column(name, justify="left" if name == names[0] else "right", no_wrap=True)
    for result in results:
        table.add_row(
            result.name,
            str(result.passes),
            f"{100 * (1 - tokens / result.computed_tokens):.0f} %",
            f"{result.seconds:.2f}",
            f"{result.tokens_per_s:,.0f}",
            f"{result.speed_up:.2f}x",
            "-" if result.peak_gib is None else f"{result.peak_gib:.1f} GiB",
            f"{result.loss:.6f}",
        )
    console_of(120).print(table)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; what is not given fits the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", help="cuda or cpu (default: cuda where there is one)")
    add("--model", choices=SHAPES, help="shape (default: qwen2-1.5b on GPU, tiny on CPU); random weights")
    add("--dtype", help="of the weights (default: bfloat16 on GPU, float32 on CPU)")
    add("--tokens", type=int, help="tokens of all rows (default: 147456 on GPU, 8192 on CPU)")
    add("--shortest", type=int, default=32, help="tokens of the shortest row (default: 32)")
    add("--longest", type=int, default=1024, help="tokens of the longest row (default: 1024)")
    add("--rows", type=int, default=8, help="rows of a micro-batch (default: 8)")
    add("--max-tokens", type=int, help="or its tokens (default: rows x longest)")
    add("--one", type=int, help="tokens of the single packed micro-batch (default: 32768 on GPU, 4096 on CPU)")
    add("--chunk", type=int, default=1024, help="tokens whose logits exist at once (default: 1024)")
    add("--gradient-checkpointing", action="store_true", help="compute activations a second time")
    add("--repeats", type=int, default=3, help="timed runs of each way; the median counts (default: 3)")
    add("--seed", type=int, default=1)
    add("--output", type=Path, default=Path("runs/train_packed"), help="folder (default: runs/train_packed)")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = options.device.startswith("cuda")
    options.model = options.model or ("qwen2-1.5b" if on_gpu else "tiny")
    options.dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    options.tokens = options.tokens or (147456 if on_gpu else 8192)
    options.one = options.one or (32768 if on_gpu else 4096)
    options.max_tokens = options.max_tokens or options.rows * options.longest
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints, writes."""
    options = parse(arguments)
    bench = Bench(options)
    batch = make_batch(
        draw_lengths(options.tokens, options.shortest, options.longest, options.seed), bench.vocab, options.seed
    )
    tokens = int(batch.attention_mask.sum())
    print(f"Without against with padding, on a few rows: {bench.agreement}")
    results: list[Result] = []
    for way in (
        Way(f"padded, {options.rows} rows", False, options.rows, None),
        Way(f"packed, {options.rows} rows", True, options.rows, None),
        Way(f"padded, {options.max_tokens:,} tokens", False, None, options.max_tokens),
        Way(f"packed, {options.max_tokens:,} tokens", True, None, options.max_tokens),
        Way("the same, compiled", True, None, options.max_tokens, compiled=True),
    ):
        results.append(bench.measure(batch, way, results[0] if results else None))
    title = (
        f"{options.model}, {options.dtype}: {batch.num_rows} rows of {options.shortest} to {options.longest} tokens, "
        f"{tokens:,} in all; forward + backward, {bench.device.type}"
    )
    print_results(results, title, tokens)
    one = bench.one_micro_batch(options.one)
    memory = "" if one["peak_gib"] is None else f", peak memory {one['peak_gib']:.1f} GiB"
    spent = "does not fit" if one["seconds"] is None else f"{one['seconds']:.2f} s{memory}"
    print(f"One packed micro-batch of {one['tokens']:,} tokens, vocabulary {bench.vocab:,}, checkpointing: {spent}")
    options.output.mkdir(parents=True, exist_ok=True)
    values = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    machine = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else "cpu"
    write_json(
        options.output / "results.json",
        {
            "settings": values,
            "machine": machine,
            "torch": torch.__version__,
            "tokens": tokens,
            "rows": batch.num_rows,
            "agreement": asdict(bench.agreement),
            "ways": [asdict(result) for result in results],
            "one_micro_batch": one,
        },
    )
    print(f"Written: {options.output / 'results.json'}")
    return 0 if bench.agreement.shortfall(exact=bench.exact) is None else 1


if __name__ == "__main__":
    sys.exit(main())
