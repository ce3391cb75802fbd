"""Two schedulers with the same requests and no model, one stood in for: the same steps, states and tokens."""

import hashlib
import random
from collections import Counter, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from colocate_rl.engine import known
from colocate_rl.engine.lean import _Collector
from colocate_rl.engine.steps import Steps
from tests.engine.twins import state_of
from tests.tiny import tiny_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

BLOCK_SIZE, LONGEST, STOPS = 16, 128, [3, 5, 7]
SIZES = [(200, 8, 64), (22, 8, 64), (30, 16, 200), (14, 6, 32)]
"""Blocks, requests at once, tokens of a step: all but the first preempt."""


def scheduler(folder: Path, size: tuple[int, int, int], ahead: bool, runner: int) -> Any:
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig  # noqa: TID251
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: TID251
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: TID251
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: TID251
    from vllm.v1.structured_output import StructuredOutputManager  # noqa: TID251

    blocks, sequences, tokens = size
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=LONGEST),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=sequences,
            max_num_batched_tokens=tokens,
            max_model_len=LONGEST,
            enable_chunked_prefill=True,
            async_scheduling=ahead,
            is_encoder_decoder=False,
        ),
        device_config=DeviceConfig("cpu"),
    )
    cache.num_gpu_blocks = blocks
    layout = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
    made = (AsyncScheduler if ahead else Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], layout)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )
    made.use_v2_model_runner = runner == 2
    return made


class Driver:
    """A scheduler, and in place of the model a function of a request's name and a position."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.under_way: deque[Any] = deque()
        self.tokens: dict[str, list[int]] = {}

    def add(self, name: str, prompt: list[int], limit: int) -> None:
        from vllm.sampling_params import SamplingParams  # noqa: TID251
        from vllm.utils.hashing import sha256  # noqa: TID251
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher  # noqa: TID251
        from vllm.v1.request import Request  # noqa: TID251

        params = SamplingParams(max_tokens=limit, stop_token_ids=STOPS, ignore_eos=True, logprobs=0)
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        )
        self.register(request)
        self.scheduler.add_request(request)

    def register(self, request: Any) -> None:
        self.tokens[request.request_id] = []

    def schedule(self) -> Any:
        step = self.scheduler.schedule(False)
        if step.total_num_scheduled_tokens:
            cached = step.scheduled_cached_reqs
            computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            computed |= {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
            sampled = [
                []
                if self.scheduler.requests[name].is_prefill_chunk
                else [hashlib.md5(f"{name} {computed[name] + number}".encode()).digest()[0]]
                for name, number in step.num_scheduled_tokens.items()
            ]
            self.under_way.append((step, sampled))
        return step

    def update(self) -> None:
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput  # noqa: TID251

        if self.under_way:
            step, sampled = self.under_way.popleft()
            names = list(step.num_scheduled_tokens)
            ids = np.array([tokens or [0] for tokens in sampled])
            output = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: row for row, name in enumerate(names)},
                sampled_token_ids=sampled,
                logprobs=LogprobsLists(ids, -ids / 100, np.zeros(len(ids), int), None),
                prompt_logprobs_dict={},
                pooler_output=[],
            )
            found = self.scheduler.update_from_output(step, output)
            self.take([one for outputs in found.values() for one in outputs.outputs])

    def take(self, outputs: list[Any]) -> None:
        for output in outputs:
            self.tokens[output.request_id] += output.new_token_ids

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus  # noqa: TID251

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)


class Lean(Driver):
    """The same with our steps."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self.collector = _Collector(LONGEST)
        core = SimpleNamespace(scheduler=scheduler)
        assert known.obstacle(core) is None
        self.steps, self.count = Steps(core), Counter[str]()
        assert self.steps.decoding is not None
        step = self.steps.decoding._step

        def counted(*found: Any) -> Any:
            self.count["plain"] += 1
            return step(*found)

        self.steps.decoding._step = counted  # type: ignore[method-assign]

    def register(self, request: Any) -> None:
        self.collector.expect(len(self.tokens))
        self.collector.add_request(request)
        self.tokens[request.request_id] = self.collector.running[request.request_id].token_ids

    def take(self, outputs: list[Any]) -> None:
        self.collector.process_outputs(outputs)

    def abort(self, name: str) -> None:
        super().abort(name)
        del self.collector.running[name]


@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_both_take_the_same_steps(tmp_path: Path, size: tuple[int, int, int], ahead: bool, runner: int) -> None:
    from vllm.utils.hashing import sha256  # noqa: TID251
    from vllm.v1.core.kv_cache_utils import init_none_hash  # noqa: TID251

    init_none_hash(sha256)
    tiny_config(architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    chance, num_steps, preempted = random.Random(size[0]), 0, 0
    own, theirs = (scheduler(tmp_path, size, ahead, runner) for _ in range(2))
    lean, usual = Lean(own), Driver(theirs)
    shared = [chance.randrange(250) for _ in range(40)]
    todo = [
        (f"r{n}", [*shared[: chance.randrange(1, 40)], chance.randrange(250)], chance.randrange(1, 100))
        for n in range(60)
    ]
    with lean.steps.standing_in(lean.collector.running):
        while todo or lean.scheduler.has_requests() or lean.under_way:
            new = [todo.pop() for _ in range(10 if not num_steps else chance.random() < 0.2) if todo]
            leaving = [chance.choice(lean.scheduler.running)] if num_steps % 50 == 49 and lean.scheduler.running else []
            for driver in (lean, usual):
                for request in new:
                    driver.add(*request)
                for aborted in leaving:
                    driver.abort(aborted.request_id)
            step, expected = lean.schedule(), usual.schedule()
            expected.num_common_prefix_blocks = expected.num_common_prefix_blocks or step.num_common_prefix_blocks
            assert step == expected
            assert state_of(lean.scheduler) == state_of(usual.scheduler)
            if not ahead or len(lean.under_way) > 1 or not step.total_num_scheduled_tokens:
                lean.update()
                usual.update()
            assert state_of(lean.scheduler) == state_of(usual.scheduler)
            assert lean.tokens == usual.tokens
            preempted = max(preempted, sum(one.num_preemptions for one in lean.scheduler.requests.values()))
            num_steps += 1
    assert (preempted > 2) == (size != SIZES[0])
    assert num_steps / 4 < lean.count["plain"] < num_steps
