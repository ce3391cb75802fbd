"""Both ways of a LoRA adapter into an engine, in one run: seconds of a sync, and what generation costs with each.

  adapter   the factors are packed, copied and written into the engine's LoRA slot (median of 20)
  merged    each adapted weight is merged in a temporary and copied into the engine (median of 5)
  whole     every weight of the base model is copied, as full fine-tuning does (median of 5)
Generation is 64 prompts of 32 tokens with 256 new tokens each (median of 2, after a first one), with CUDA graphs unless
--eager is given, with which an engine starts in seconds: syncs are the same then, and generation tells nothing.
"""

import statistics
import time
from typing import Any

from rich.table import Table

from benchmarks.processes import RunError
from benchmarks.results import console_of
from benchmarks.work import shape_config

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 64, 32, 256


def measure(shape: str, rank: int, trainer: int, host: int, *, eager: bool) -> list[dict[str, Any]]:
    """All figures of one shape and rank, from an engine with a slot and from one without."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = shape_config(shape)
    torch.manual_seed(0)
    with torch.device("cuda", trainer):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        policy = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS)))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
    row: dict[str, Any] = {"shape": shape, "rank": rank, "eager": eager, "num_tensors": 0}
    for way in ("adapter", "merged"):
        row |= measure_way(way, policy, config, rank, (trainer, host), eager)
    return [{**row, "break_even_tokens": break_even(row)}]


def break_even(row: dict[str, Any]) -> float | None:
    """Tokens of a completion from which on merging costs a step less than the slot; None: the slot costs nothing."""
    slot, merged = (PROMPTS / row[f"generate_{way}_tokens_per_s"] for way in ("adapter", "merged"))
    return None if slot <= merged else (row["merged_s"] - row["adapter_s"]) / (slot - merged)


def measure_way(way: str, policy: Any, config: Any, rank: int, devices: tuple[int, int], eager: bool) -> dict[str, Any]:
    """Sync and generation one way, in an engine built for it."""
    import torch

    from benchmarks.weight_sync import build_engine, timed
    from colocate_rl.engine.spec import LoraSpec
    from colocate_rl.senders import LoraSender

    engine = build_engine(
        config,
        devices[1],
        max_model_length=PROMPT_TOKENS + NEW_TOKENS,
        max_num_seqs=PROMPTS,
        gpu_memory_utilization=0.4,
        enforce_eager=eager,
        kv_cache_bytes=4 << 30,
        lora=LoraSpec(rank, TARGETS) if way == "adapter" else None,
    )
    sender = LoraSender(policy, torch.bfloat16, merged=way == "merged")
    found: dict[str, Any] = {f"first_{way}_s": timed(lambda: sender.send(engine), devices)}
    times = [timed(lambda: sender.send(engine), devices) for _ in range(20 if way == "adapter" else 5)]
    found[f"{way}_s"] = statistics.median(times)
    found[f"generate_{way}_tokens_per_s"] = tokens_per_second(engine)
    if way == "adapter":
        found["num_tensors"] = 2 * len(sender._factors.layers)
        found["adapter_bytes"] = 2 * sender._factors.pack().numel()
        check_arrival(engine, sender)
    else:
        whole: list[float] = []
        for _ in range(5):
            sender.forget()
            whole.append(timed(lambda: sender.send(engine), devices) - found["merged_s"])
        found["whole_s"] = statistics.median(whole)
    engine.close()
    return found


def tokens_per_second(engine: Any) -> float:
    """Of generation with sampled tokens."""
    from colocate_rl.engine.protocol import Request, SamplingSpec

    requests = [Request([7 + (31 * n + place) % 1000 for place in range(PROMPT_TOKENS)], 1) for n in range(PROMPTS)]
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        engine.generate(requests, SamplingSpec(max_tokens=NEW_TOKENS))
        seconds.append(time.perf_counter() - start)
    return PROMPTS * NEW_TOKENS / statistics.median(seconds[1:])


def check_arrival(engine: Any, sender: Any) -> None:
    """Compares what lies in the engine's slot with the packed factors."""
    import torch

    slot = engine._slot
    flat = sender._factors.pack().to(slot._staging.device)
    torch.cuda.synchronize()
    for target, source in zip(slot._targets, slot._sources, strict=True):
        if not torch.equal(target, source) or not torch.equal(slot._staging, flat):
            raise RunError("the adapter did not arrive in the engine's slot as it was sent.")


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Prints one line per shape."""
    table = Table(title="LoRA sync: milliseconds; generation: thousand tokens/s")
    names = (
        "shape",
        "rank",
        "tensors",
        "adapter MB",
        "adapter",
        "merged",
        "whole",
        "generate: slot",
        "generate: merged",
        "even at",
    )
    for name in names:
        table.add_column(name, justify="left" if name == "shape" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["shape"],
            str(row["rank"]),
            str(row["num_tensors"]),
            f"{row['adapter_bytes'] / 1e6:.0f}",
            *(f"{1000 * row[f'{way}_s']:.1f}" for way in ("adapter", "merged", "whole")),
            *(f"{row[f'generate_{way}_tokens_per_s'] / 1000:.1f}" for way in ("adapter", "merged")),
            "-" if row["break_even_tokens"] is None else f"{row['break_even_tokens']:.0f} tokens",
        )
    console_of(140).print(table)
