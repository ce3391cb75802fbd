"""Whether this vLLM's scheduler and sampler are ones that our code may stand in for.

By its source, not by its version: also a patched or a future vLLM is either one that was read, or left alone.
"""

import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

KNOWN: Mapping[str, str] = {
    "Scheduler.update_from_output": (
        "31ade6d74c2a c261e6eb46f5 844367185957 80ee78ae5e18 d4e4eb016613 616e84edbb35 ac3f8f3f3a48 85b29db96051"
    ),
    "Scheduler._update_request_with_output": "389ae7ea2b1a ff6e3f664c99",
    "Scheduler._update_after_schedule": "ffb224d26781 01b45b9ee09a 64687e40211f 2b527eb8070d",
    "AsyncScheduler._update_request_with_output": "0a8d94d5aaa2 c4c4ccac872a",
    "AsyncScheduler._update_after_schedule": "c49d8b90a61c 138d47daea23",
    "KVCacheManager.allocate_slots": "7ef368d75f56 5b028bc42bfc ad0718265749 36fc381bfdd8 ffa596d58dfb 8c60d937fd9e",
    "Request.append_output_token_ids": "8ff2924a5d87",
    "check_stop": "6165c7369f4a 5149b60c92d2",
}
"""Digests (:func:`digests`) of the methods that were read, in vLLM 0.24 to 0.32.

A method that is new in a version has to be read before its digest is added: does a token that ends nothing still change
only the fields of its request that :meth:`colocate_rl.engine.steps.Steps._append` changes?
"""
SCHEDULES: Mapping[str, str] = {
    "Scheduler.schedule": (
        "7b869a5dcbce 4d54777c82ef 491d8fe7c9e3 185eb7ae0ab6 1bdbc0eb0ac5 6361fde74c84 a04a9c05b019 73b6a4084e76"
        " da4f2cf2fc39"
    ),
    "Scheduler._make_cached_request_data": "8aeb1dc3ba93",
    "Scheduler.get_request_counts": "659881a8a9a6 c901ce17db93",
    "SchedulerOutput": "1b541910ef6d 7194158700f9 c3383ff1bb54 d035353ca104 a0d65e8fccde e6c209fc2a0f 97fb4463a2ed",
    "CachedRequestData": "b0a215b04012",
}
"""Digests (:func:`schedule_digests`) of what :mod:`colocate_rl.engine.decoding` stands in for, in vLLM 0.24 to 0.32.

Before one is added: does a step in which all requests decode still change nothing else of the scheduler and of its
requests, and does :meth:`colocate_rl.engine.decoding.Decoding._step` fill each field that such a step has?
"""
SAMPLERS = "c495c340f429 ce4a84b9742b 3b5e1c2a4baf 82f244ca357c aefff84b7bed 61c483d3c549 006b7ca4c995 aec2c8c226b5"
"""Digests of the ``Sampler`` that :mod:`colocate_rl.engine.sampling` stands in for, in vLLM 0.24 to 0.32.

Before one is added: does a batch of plain requests still get nothing else than tokens, their log-probabilities and how
many were sampled, and which new field of ``SamplingParams`` or of the sampler changes logits?
"""
SPECIAL = (
    "connector",
    "ec_connector",
    "aux_output_connector",
    "num_spec_tokens",
    "enable_return_routed_experts",
    "return_sampling_mask",
    "is_encoder_only",
    "is_mm_encoder_only",
    "log_stats",
    "use_pp",
    "needs_kv_cache_zeroing",
)
"""What a scheduler must not have or do."""


def obstacle(core: Any) -> str | None:
    """Why the steps of this engine core must stay with vLLM; None: they need not."""
    scheduler = core.scheduler
    special = [name for name in SPECIAL if getattr(scheduler, name, None)]
    if special:
        return f"the scheduler uses {', '.join(special)}"
    groups = scheduler.kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if kinds != ["FullAttentionSpec"] or groups[0].kv_cache_spec.block_size != scheduler.block_size:
        return f"the cache has the layout {kinds}"
    unknown = [name for name, digest in digests(core).items() if digest not in KNOWN.get(name, "").split()]
    return f"this vLLM has other versions of {', '.join(unknown)}" if unknown else None


def unread_schedule(core: Any) -> list[str]:
    """What this vLLM schedules otherwise than those that were read; empty: nothing."""
    return [name for name, digest in schedule_digests(core).items() if digest not in SCHEDULES.get(name, "").split()]


def is_read_sampler(kind: type[Any]) -> bool:
    """Whether this is the sampler of vLLM's newer model runner, in one of the versions that were read."""
    return kind.__name__ == "Sampler" and _digest(kind) in SAMPLERS.split()


def digests(core: Any) -> dict[str, str]:
    """Digests of the sources of the methods in :data:`KNOWN`, as they are in the vLLM that runs."""
    scheduler, names = core.scheduler, names_of(core.scheduler)
    methods = {
        f"{kind.__name__}.{name}": vars(kind)[name]
        for kind in type(scheduler).__mro__
        for name in ("update_from_output", "_update_request_with_output", "_update_after_schedule")
        if name in vars(kind) and kind.__name__ != "SchedulerInterface"
    }
    methods["KVCacheManager.allocate_slots"] = type(scheduler.kv_cache_manager).allocate_slots
    methods["Request.append_output_token_ids"] = names["Request"].append_output_token_ids
    methods["check_stop"] = names["check_stop"]
    return {name: _digest(method) for name, method in methods.items()}


def schedule_digests(core: Any) -> dict[str, str]:
    """Digests of the sources of the methods and classes in :data:`SCHEDULES`, as they are in the vLLM that runs."""
    kind, names = type(core.scheduler), names_of(core.scheduler)
    methods = (kind.schedule, kind._make_cached_request_data, kind.get_request_counts)
    classes = (names["SchedulerOutput"], names["CachedRequestData"])
    return {part.__qualname__: _digest(part) for part in (*methods, *classes)}


def _digest(part: Any) -> str:
    return hashlib.sha256(inspect.getsource(part).encode()).hexdigest()[:12]


def num_placeholders(scheduler: Any) -> int:
    """Tokens of a request that a step only promises: a scheduler that is a step ahead counts one not sampled yet."""
    return int(type(scheduler).__name__ == "AsyncScheduler")


def names_of(scheduler: Any) -> dict[str, Any]:
    """The names that the scheduler's own methods see."""
    names: dict[str, Any] = type(scheduler).update_from_output.__globals__
    return names
