"""How much memory the log-probabilities take: chunked (this library) against full logits.

    python benchmarks/logprob_memory.py                        # on the first GPU, or on CPU with smaller sizes
    python benchmarks/logprob_memory.py --device cpu --vocab 8192 --hidden 64 --tokens 512 1024 2048 --chunks 64 256

Each point is one forward and backward pass from hidden states to log-probabilities; what is counted is memory beyond
the hidden states and the head, which are there before. Two sweeps: tokens (batch x length), at each chunk size
and full logits; and vocabulary, at each chunk size. Writes results.json and logprob_memory.png into --output.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.table import Table
from torch import nn

from benchmarks.results import console_of
from benchmarks.work import write_json
from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.training.logprobs import completion_statistics

MIB = 1 << 20


@dataclass(frozen=True)
class Point:
    """One measurement."""

    method: str
    """"chunked" or "full"."""
    tokens: int
    vocab: int
    chunk: int | None
    peak_mib: float | None
    """Highest memory in use beyond what was there before; None when it did not fit."""
    seconds: float | None
    """Of both passes, on GPU."""
    logits_mib: float
    """What float32 logits of all tokens alone would take."""


class StatesModel(nn.Module):
    """A language model whose decoder only returns its parameter: nothing but the log-probabilities is measured."""

    def __init__(self, tokens: int, hidden: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.states = nn.Parameter(torch.randn(1, tokens + 1, hidden, dtype=dtype, device=device))
        self.head = nn.Linear(hidden, vocab, bias=False, dtype=dtype, device=device)
        self.config = SimpleNamespace()

    def get_output_embeddings(self) -> nn.Linear:
        """The head, as transformers' models name it."""
        return self.head

    def forward(self, **_: Any) -> SimpleNamespace:
        """Hidden states of the row, whatever the ids."""
        return SimpleNamespace(last_hidden_state=self.states)


def make_batch(tokens: int, vocab: int, device: torch.device) -> RolloutBatch:
    """One row: a prompt of one token and a completion of ``tokens``."""
    ids = torch.randint(vocab, (1, tokens + 1), device=device)
    sampled = torch.ones_like(ids, dtype=torch.bool)
    sampled[:, 0] = False
    return RolloutBatch(
        input_ids=ids,
        attention_mask=torch.ones_like(sampled),
        completion_mask=sampled,
        loss_mask=sampled,
        sampling_logprobs=torch.zeros_like(ids, dtype=torch.float32),
        advantages=torch.zeros(1, device=device),
    )


def chunked(model: StatesModel, batch: RolloutBatch, chunk: int) -> torch.Tensor:
    """Log-probabilities as this library computes them."""
    statistics = completion_statistics(
        model, model, batch, temperature=1.0, chunk=chunk, autocast=contextlib.nullcontext
    )
    return statistics.logprobs


def full(model: StatesModel, batch: RolloutBatch) -> torch.Tensor:
    """The usual way: logits of every token, log-softmax, and the entropy that training logs."""
    logits = model.head(model.states[:, :-1]).float()
    logprobs = logits.log_softmax(-1)
    with torch.no_grad():
        (logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, batch.input_ids[:, 1:, None])


def on_gpu(run: Callable[[], torch.Tensor], device: torch.device) -> tuple[float, float]:
    """Peak memory in MiB beyond what is in use now, and seconds, of a forward and a backward pass."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before, start = torch.cuda.memory_allocated(device), time.perf_counter()
    run().sum().backward()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / MIB, time.perf_counter() - start


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Drops what native code writes to standard error (the profiler announces its start and end there)."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def on_cpu(run: Callable[[], torch.Tensor]) -> float:
    """The same peak, from every allocation and release that torch's profiler saw."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with silent_stderr(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run().sum().backward()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    in_use = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        in_use += event.nbytes()
        highest = max(highest, in_use)
    return highest / MIB


def take(tokens: int, vocab: int, chunk: int | None, hidden: int, dtype: torch.dtype, device: torch.device) -> Point:
    """One point (without a chunk: full logits); a pass that does not fit into the device's memory is a result too."""
    torch.manual_seed(0)
    model, batch = StatesModel(tokens, hidden, vocab, dtype, device), make_batch(tokens, vocab, device)
    run = partial(full, model, batch) if chunk is None else partial(chunked, model, batch, chunk)
    peak: float | None = None
    seconds: float | None = None
    try:
        if device.type == "cuda":
            peak, seconds = on_gpu(run, device)
        else:
            peak = on_cpu(run)
    except torch.OutOfMemoryError:
        pass
    del run, model, batch
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Point("full" if chunk is None else "chunked", tokens, vocab, chunk, peak, seconds, tokens * vocab * 4 / MIB)


def sweep(options: argparse.Namespace, device: torch.device) -> list[Point]:
    """Both sweeps; the largest vocabulary is the one of the first."""
    dtype, vocab, most = getattr(torch, options.dtype), max(options.vocab), max(options.tokens)
    wanted = [(tokens, vocab, chunk) for tokens in options.tokens for chunk in (None, *options.chunks)]
    wanted += [(most, size, chunk) for size in options.vocab if size != vocab for chunk in options.chunks]
    for chunk in (None, options.chunks[0]):  # libraries take their own memory on first use
        take(min(options.tokens), min(options.vocab), chunk, options.hidden, dtype, device)
    return [take(*sizes, options.hidden, dtype, device) for sizes in wanted]


def label(point: Point) -> str:
    """Name of a point's method."""
    return "full logits" if point.chunk is None else f"chunk {point.chunk}"


def mib(value: float | None) -> str:
    """Readable memory."""
    if value is None:
        return "does not fit"
    return f"{value / 1024:.2f} GiB" if value >= 1024 else f"{value:.1f} MiB"


def print_points(points: list[Point], title: str) -> None:
    """Prints one line per point."""
    timed = any(point.seconds is not None for point in points)
    table = Table(title=title)
    names = ["tokens", "vocabulary", "method", "peak memory", "of full float32 logits"]
    for name in names + ["forward + backward"] * timed:
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    previous = points[0]
    for point in points:
        if (previous.tokens, previous.vocab) != (point.tokens, point.vocab):
            table.add_section()
        previous = point
        ratio = "-" if point.peak_mib is None else f"{100 * point.peak_mib / point.logits_mib:.0f} %"
        seconds = "-" if point.seconds is None else f"{1000 * point.seconds:.0f} ms"
        cells = [f"{point.tokens:,}", f"{point.vocab:,}", label(point), mib(point.peak_mib), ratio]
        table.add_row(*cells, *([seconds] * timed))
    console_of(110).print(table)


def draw(points: list[Point], path: Path, title: str) -> None:
    """Peak against tokens (lines: methods) and against the chunk (lines: vocabularies)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    vocab, tokens = max(point.vocab for point in points), max(point.tokens for point in points)
    for name in dict.fromkeys(label(point) for point in points):
        line = [point for point in points if label(point) == name and point.vocab == vocab and point.peak_mib]
        style = {"color": "#222222", "linestyle": "--"} if name == "full logits" else {}
        left.plot([point.tokens for point in line], [point.peak_mib for point in line], marker="o", label=name, **style)
    left.set(xlabel="tokens (batch x length)", title=f"vocabulary {vocab:,}", xscale="log", yscale="log")
    for size in sorted({point.vocab for point in points}):
        line = [
            point
            for point in points
            if point.vocab == size and point.tokens == tokens and point.chunk and point.peak_mib
        ]
        right.plot(
            [point.chunk for point in line], [point.peak_mib for point in line], "o-", label=f"vocabulary {size:,}"
        )
    right.set(
        xlabel="chunk (tokens whose logits exist at once)", title=f"{tokens:,} tokens", xscale="log", yscale="log"
    )
    for axes, values in ((left, {p.tokens for p in points}), (right, {p.chunk for p in points if p.chunk})):
        axes.set_xticks(sorted(values), [f"{value:,}" for value in sorted(values)])
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.minorticks_off()
        axes.set_ylabel("peak memory (MiB)")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; what is not given fits the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", help="cuda or cpu (default: cuda where there is one)")
    add("--tokens", type=int, nargs="+", help="numbers of tokens (default: up to 32768 on GPU, 2048 on CPU)")
    add("--vocab", type=int, nargs="+", help="vocabularies (default: up to 151936 on GPU, 16384 on CPU)")
    add("--chunks", type=int, nargs="+", help="chunk sizes (default: up to 4096 on GPU, 1024 on CPU)")
    add("--hidden", type=int, help="width of the hidden states (default: 1536 on GPU, 64 on CPU)")
    add("--dtype", help="of hidden states and head (default: bfloat16 on GPU, float32 on CPU)")
    add("--output", type=Path, default=Path("runs/logprob_memory"), help="folder (default: runs/logprob_memory)")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = options.device.startswith("cuda")
    options.tokens = sorted(options.tokens or ([2048, 8192, 32768] if on_gpu else [512, 1024, 2048]))
    options.vocab = sorted(options.vocab or ([32768, 151936] if on_gpu else [4096, 16384]))
    options.chunks = sorted(options.chunks or ([256, 1024, 4096] if on_gpu else [64, 256, 1024]))
    options.hidden = options.hidden or (1536 if on_gpu else 64)
    options.dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints, writes."""
    options = parse(arguments)
    device = torch.device(options.device)
    points = sweep(options, device)
    title = f"Log-probabilities, forward and backward, hidden size {options.hidden}, {options.dtype}, {device.type}"
    print_points(points, title)
    options.output.mkdir(parents=True, exist_ok=True)
    settings = {name: getattr(options, name) for name in ("tokens", "vocab", "chunks", "hidden", "dtype", "device")}
    write_json(
        options.output / "results.json",
        {"settings": settings, "torch": torch.__version__, "points": [asdict(point) for point in points]},
    )
    draw(points, options.output / "logprob_memory.png", title)
    print(f"Written: {options.output / 'results.json'}, {options.output / 'logprob_memory.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
