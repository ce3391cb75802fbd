"""How fast an engine generates, our lean way against ``LLM.generate``, and where the time of a step goes.

    python benchmarks/generation.py                                      # on the first GPU; Qwen2 1.5B, random weights
    python benchmarks/generation.py --model tiny --cases 8x8x32 32x8x32         # on CPU

A case is prompts x completions x tokens, with log-probabilities; sampling never ends earlier. Ways, in turn, on one
engine:
  lean           our generate
  usual          our generate with EngineSpec(lean=False)
  LLM.generate   vLLM alone and its own sampler, with the same SamplingParams; its outputs are not read
Both have the model runner of the engine: VLLM_USE_V2_MODEL_RUNNER=0 measures the older one.
Then one more call of the first two with every step taken apart: milliseconds on the host per step. Waiting for the
device is a part of its own: where it is large, the device sets the pace. Writes results.json into --output.
"""

import argparse
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.table import Table

from benchmarks.results import console_of
from benchmarks.work import SHAPES, shape_config, write_json

WAYS = ("lean", "usual", "LLM.generate")
BARS = {256: 1.4, 1024: 1.5}
"""Least ratio of LLM.generate's time to ours, by the number of completions at once (on an H200)."""
PARTS = ("schedule", "launch", "sample", "wait", "update", "outputs")


@dataclass(frozen=True)
class Case:
    """So many prompts, completions of each, and tokens of each completion."""

    prompts: int
    completions: int
    tokens: int

    @classmethod
    def of(cls, text: str) -> "Case":
        try:
            return cls(*map(int, text.split("x")))
        except (TypeError, ValueError):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not prompts x completions x tokens, as in 32x8x512"
            ) from None

    def __str__(self) -> str:
        return f"{self.prompts}x{self.completions}x{self.tokens}"

    @property
    def sequences(self) -> int:
        return self.prompts * self.completions


def build_engine(options: argparse.Namespace) -> Any:
    """An engine for the largest case, with vLLM's dummy weights."""
    import torch

    from colocate_rl.engine.spec import EngineSpec
    from colocate_rl.engine.vllm_engine import VllmEngine

    on_gpu = torch.cuda.is_available()
    return VllmEngine(
        EngineSpec(
            model_config=shape_config(options.model),
            checkpoint={},
            dtype="bfloat16" if on_gpu else "float32",
            device=0 if on_gpu else None,
            seed=0,
            max_model_length=options.prompt_tokens + max(case.tokens for case in options.cases),
            max_num_seqs=max(case.sequences for case in options.cases),
            gpu_memory_utilization=options.memory,
            enforce_eager=not on_gpu,
            cpu_cores=None if on_gpu else "0",
        )
    )


def ways(engine: Any, case: Case, prompt_tokens: int) -> dict[str, Callable[[], Any]]:
    """One call of each way; all prompts are new to the prefix cache each time."""
    from colocate_rl.engine.protocol import Request, SamplingSpec
    from colocate_rl.engine.sampling import runner_of, vllms_sampler
    from colocate_rl.engine.vllm_api import sampling_parameters

    lean, vocabulary = engine._lean, engine._llm.model_config.get_vocab_size()
    if lean is None:
        raise SystemExit("benchmarks: error: the engine gave up the lean way; its warning says why.")
    prompts = [
        [(31 * place + 7 * number * (place + 1)) % vocabulary for place in range(prompt_tokens)]
        for number in range(case.prompts)
    ]
    requests = [Request(prompt, case.completions) for prompt in prompts]
    sampling = SamplingSpec(max_tokens=case.tokens)

    def ours(way: Any) -> Any:
        engine._lean = way
        try:
            return engine.generate(requests, sampling)
        finally:
            engine._lean = lean

    def alone() -> Any:
        with engine._process.entered(), vllms_sampler(runner_of(engine._llm.llm_engine.engine_core.engine_core)):
            params = [sampling_parameters(n=case.completions, max_tokens=case.tokens, ignore_eos=True) for _ in prompts]
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
            return engine._llm.generate(inputs, params, use_tqdm=False)

    return {"lean": lambda: ours(lean), "usual": lambda: ours(None), "LLM.generate": alone}


def timed(engine: Any, call: Callable[[], Any]) -> float:
    """Seconds of a call that starts with an empty prefix cache."""
    with engine._process.entered():
        engine._llm.reset_prefix_cache()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@contextmanager
def taken_apart(engine: Any) -> Iterator[dict[str, float]]:
    """Seconds of the parts of all steps in the block, and their number ("steps")."""
    core, llm_engine = engine._llm.llm_engine.engine_core.engine_core, engine._llm.llm_engine
    spent: dict[str, float] = defaultdict(float)

    def watch(
        owner: Any, name: str, part: str, then: Callable[[Any], Any] = lambda result: result
    ) -> Callable[[], None]:
        method = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return then(method(*args, **kwargs))
            finally:
                spent[part] += time.perf_counter() - start

        setattr(owner, name, watched)
        return lambda: delattr(owner, name)

    def with_wait(result: Any) -> Any:
        if hasattr(result, "result"):  # scheduled ahead: what was sampled is asked for later
            watch(result, "result", "wait")
        return result

    def count(result: Any) -> Any:
        spent["steps"] += 1
        return result

    steps = None if engine._lean is None else engine._lean._steps
    update, schedule = steps or core.scheduler, (steps and steps.decoding) or core.scheduler
    with ExitStack() as stack:
        for undo in (
            watch(schedule, "schedule", "schedule"),
            watch(core.model_executor, "execute_model", "launch"),
            watch(core.model_executor, "sample_tokens", "sample", with_wait),
            watch(update, "update_from_output", "update"),
            watch(llm_engine.output_processor, "process_outputs", "outputs"),
            watch(llm_engine, "step", "step", count),
        ):
            stack.callback(undo)
        yield spent


def break_down(engine: Any, calls: dict[str, Callable[[], Any]]) -> dict[str, dict[str, float]]:
    """Milliseconds per step and part, of both of our ways."""
    lean, rows = engine._lean, {}
    for way in ("lean", "usual"):
        engine._lean = lean if way == "lean" else None
        with taken_apart(engine) as spent:
            engine._lean = lean
            timed(engine, calls[way])
        per_step = {part: 1000 * spent[part] / spent["steps"] for part in (*PARTS, "step")}
        per_step["other"] = per_step["step"] - sum(per_step[part] for part in PARTS)
        rows[way] = {"steps": spent["steps"], **per_step}
    return rows


def measure(engine: Any, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one case."""
    calls = ways(engine, case, options.prompt_tokens)
    rounds = [{way: timed(engine, call) for way, call in calls.items()} for _ in range(options.rounds + 1)][1:]
    seconds = {way: statistics.median(times[way] for times in rounds) for way in calls}
    num_tokens = case.sequences * case.tokens
    return {
        "case": str(case),
        "sequences": case.sequences,
        "seconds": seconds,
        "all_seconds": rounds,
        "tokens_per_s": {way: num_tokens / value for way, value in seconds.items()},
        "ms_per_step": {way: 1000 * value / case.tokens for way, value in seconds.items()},
        "speedup": seconds["LLM.generate"] / seconds["lean"],
        "speedup_over_usual": seconds["usual"] / seconds["lean"],
        "bar": BARS.get(case.sequences) if engine._device is not None else None,
        "parts_ms": break_down(engine, calls),
    }


def print_rows(rows: list[dict[str, Any]], title: str) -> None:
    """One table of speeds, one of parts, and the bars."""
    speeds = Table(title=f"Generation, {title}")
    for name in ("case", "way", "s", "tokens/s", "ms per step", "LLM.generate / it"):
        speeds.add_column(name, justify="left" if name in ("case", "way") else "right", no_wrap=True)
    parts = Table(title="A step's milliseconds on the host")
    for name in ("case", "way", *PARTS, "other", "step"):
        parts.add_column(name, justify="left" if name in ("case", "way") else "right", no_wrap=True)
    for row in rows:
        for way in WAYS:
            spent = row["seconds"][way]
            ratio = row["seconds"]["LLM.generate"] / spent
            speed, pace = row["tokens_per_s"][way], row["ms_per_step"][way]
            speeds.add_row(row["case"], way, f"{spent:.3f}", f"{speed:,.0f}", f"{pace:.2f}", f"{ratio:.2f}")
        for way, times in row["parts_ms"].items():
            parts.add_row(row["case"], way, *(f"{times[part]:.2f}" for part in (*PARTS, "other", "step")))
    console = console_of(120)
    console.print(speeds)
    console.print(parts)
    for row in rows:
        if row["bar"] is not None:
            verdict = "reached" if row["speedup"] >= row["bar"] else "NOT reached"
            print(f"{row['case']}: {row['speedup']:.2f} times LLM.generate; bar on an H200 {row['bar']}: {verdict}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=SHAPES, default="qwen2-1.5b", help="shape (default: qwen2-1.5b)")
    add("--cases", nargs="+", type=Case.of, default=[Case(32, 8, 512), Case(128, 8, 512)], metavar="PxGxT")
    add("--prompt-tokens", type=int, default=128, metavar="N", help="tokens of each prompt (default: 128)")
    add("--rounds", type=int, default=3, metavar="N", help="measured calls of each way, after one more (default: 3)")
    add(
        "--memory", type=float, default=0.85, metavar="SHARE", help="of the GPU that the engine may use (default: 0.85)"
    )
    add("--output", type=Path, default=Path("runs/generation"), help="folder (default: runs/generation)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measures every case."""
    options = parse(arguments)
    import torch

    from colocate_rl.engine.spec import vllm_version

    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.processor() or "CPU"
    result: dict[str, Any] = {
        "device": device,
        "torch": torch.__version__,
        "vllm": vllm_version(),
        "model": options.model,
        "prompt_tokens": options.prompt_tokens,
    }
    engine = build_engine(options)
    try:
        rows = []
        for case in options.cases:
            print(f"Measuring {case} ...", flush=True)
            rows.append(measure(engine, case, options))
            write_json(output / "results.json", {**result, "obstacle": engine._lean.obstacle, "rows": rows})
        if engine._lean.obstacle:
            print(f"Steps stay with vLLM: {engine._lean.obstacle}.")
    finally:
        engine.close()
    print_rows(rows, f"{options.model} on {device}, vLLM {result['vllm']}")
    print(f"Written: {output / 'results.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
