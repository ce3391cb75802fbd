"""One engine on a GPU: where its memory is, what it takes over, and what it leaves behind."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from colocate_rl.engine.protocol import Completion, Request, SamplingSpec
from colocate_rl.engine.vllm_engine import VllmEngine
from colocate_rl.errors import WeightSyncError
from tests.engine.twins import compare_steps
from tests.gpu.conftest import ENGINE_GPU, gpu_model, needs_two_gpus, weights

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

Build = Callable[..., VllmEngine]
PROMPTS = [list(range(10 + shift, 50 + shift)) for shift in range(8)]


def parameters(engine: VllmEngine) -> dict[str, torch.Tensor]:
    return dict(engine._model.named_parameters())


def shift(model: PreTrainedModel, number: int) -> None:
    with torch.no_grad():
        for position, parameter in enumerate(model.parameters()):
            parameter.add_(0.03 * number * (1 + position % 5))


def expected(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The policy's weights as vLLM fuses them, rounded once to bfloat16."""
    own = dict(weights(model))
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    found = {}
    for name, tensor in own.items():
        for target, parts in fused.items():
            if f".{parts[0]}." in name:
                tensor = torch.cat([own[name.replace(parts[0], part)] for part in parts])
                name = name.replace(parts[0], target)
        if not any(f".{part}." in name for parts in fused.values() for part in parts):
            found[name] = tensor.to(torch.bfloat16)
    return found


def policy_gap(model: PreTrainedModel, prompt: list[int], completion: Completion) -> torch.Tensor:
    """Mean |difference| between the policy's and the engine's log-probabilities, in nats."""
    ids = torch.tensor([[*prompt, *completion.token_ids]], device="cuda:0")
    with torch.no_grad():
        table = model(ids).logits.float().log_softmax(-1)[0, len(prompt) - 1 : -1]
    policy = table.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
    return (policy - torch.tensor(completion.sampling_logprobs)).abs().mean()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_syncs_are_bit_exact_and_keep_the_storage(build: Build, dtype: torch.dtype, tied: bool) -> None:
    model = gpu_model(dtype, tied=tied)
    engine = build(model)
    addresses = {name: tensor.data_ptr() for name, tensor in parameters(engine).items()}
    for number in range(1, 4):
        shift(model, number)
        engine.load_weights(weights(model))
        found = parameters(engine)
        for name, tensor in expected(model).items():
            rows = tensor.shape[0]  # vLLM pads the vocabulary
            assert torch.equal(found[name][:rows].cpu(), tensor.cpu()), name
        assert {name: tensor.data_ptr() for name, tensor in found.items()} == addresses
        assert set(found) == set(expected(model))


def test_weights_that_do_not_fit_are_refused_by_name(build: Build) -> None:
    model = gpu_model()
    engine = build(model)
    good = dict(weights(model))
    name = "model.layers.1.mlp.up_proj.weight"
    for wrong in (
        {n: t for n, t in good.items() if n != name},
        {f"x.{n}" if n == name else n: t for n, t in good.items()},
    ):
        with pytest.raises(WeightSyncError, match="up_proj"):
            engine.load_weights(wrong.items())


@pytest.mark.parametrize("eager", [True, False])
def test_greedy_text_and_logprobs_are_the_policys(build: Build, eager: bool) -> None:
    model = gpu_model()
    engine = build(model, enforce_eager=eager)
    for number in range(2):
        shift(model, number)
        engine.load_weights(weights(model))
        answers = engine.generate([Request(prompt, 2) for prompt in PROMPTS], SamplingSpec(max_tokens=48))
        pairs = zip(PROMPTS, answers, strict=True)
        gaps = [policy_gap(model, prompt, completion) for prompt, answer in pairs for completion in answer]
        assert float(torch.stack(gaps).mean()) < 0.03
        greedy = engine.generate(
            [Request(prompt, 1) for prompt in PROMPTS], SamplingSpec(max_tokens=1, temperature=0.0)
        )
        with torch.no_grad():
            best = model(torch.tensor(PROMPTS, device="cuda:0")).logits[:, -1].float()
        for row, answer in zip(best, greedy, strict=True):
            chosen = answer[0].token_ids[0]
            assert float(row.max() - row[chosen]) < 0.1  # a tie in bfloat16 at most


def memory(device: int) -> tuple[int, int]:
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)


@needs_two_gpus
@pytest.mark.parametrize("eager", [True, False])
def test_the_training_gpu_is_untouched(eager: bool) -> None:
    from tests.gpu.conftest import gpu_spec

    model = gpu_model()
    torch.cuda.set_device(0)
    named = weights(model)
    before, free = memory(0), torch.cuda.mem_get_info(0)[0]
    random_state = torch.cuda.get_rng_state(0)

    def unchanged() -> None:
        assert torch.cuda.current_device() == 0
        assert memory(0) == before
        assert torch.equal(torch.cuda.get_rng_state(0), random_state)

    engine = VllmEngine(gpu_spec(model, enforce_eager=eager))
    unchanged()
    assert {tensor.device.index for tensor in parameters(engine).values()} == {1}
    engine.load_weights(named)
    unchanged()
    engine.generate([Request(prompt, 4) for prompt in PROMPTS], SamplingSpec(max_tokens=32))
    unchanged()
    with pytest.raises(WeightSyncError):
        engine.load_weights(named[1:])
    unchanged()
    assert memory(1)[0] > 0
    engine.close()
    unchanged()
    # Also beneath PyTorch's allocator: GPU 0 holds no more than before (a peer-access mapping may cost a few MB).
    assert torch.cuda.mem_get_info(0)[0] >= free - 64 * 2**20


def test_build_close_build_frees_the_memory(build: Build) -> None:
    model = gpu_model()
    used = []
    for _ in range(2):
        engine = build(model)
        engine.load_weights(weights(model))
        engine.close()
        gc.collect()
        with torch.cuda.device(ENGINE_GPU):
            torch.cuda.empty_cache()
        used.append(torch.cuda.memory_allocated(ENGINE_GPU))
    assert used[1] <= used[0] + 2**20
    assert used[0] < 2**30


VISIBLE = """
import torch
from tests.gpu.conftest import gpu_model, gpu_spec, weights
from colocate_rl.engine.vllm_engine import VllmEngine
model = gpu_model()
engine = VllmEngine(gpu_spec(model))
engine.load_weights(weights(model))
where = {torch.cuda.get_device_properties(t.device).uuid for t in engine._model.parameters()}
print("policy", torch.cuda.get_device_properties(0).uuid, "engine", *where)
engine.close()
"""


@needs_two_gpus
@pytest.mark.parametrize("naming", ["reversed", "uuids"])
def test_any_spelling_of_the_visible_devices(naming: str) -> None:
    uuids = [str(torch.cuda.get_device_properties(device).uuid) for device in range(2)]
    visible = {"reversed": "1,0", "uuids": ",".join(f"GPU-{uuid}" for uuid in uuids)}[naming]
    done = subprocess.run(
        [sys.executable, "-c", VISIBLE],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": visible},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    order = uuids[::-1] if naming == "reversed" else uuids
    assert f"policy {order[0]} engine {order[1]}" in done.stdout


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_lean_generation_gives_what_vllm_gives(build: Build, enforce_eager: bool) -> None:
    model = gpu_model()
    engine = build(model, enforce_eager=enforce_eager, max_num_seqs=16)  # some requests wait
    engine.load_weights(weights(model))
    lean = engine._lean
    assert lean is not None
    assert lean.obstacle is None
    for sampling in (
        SamplingSpec(max_tokens=100),
        SamplingSpec(max_tokens=100, temperature=0.7, top_p=0.9, stop_token_ids=tuple(range(0, 250, 40))),
    ):
        for seed in (11, None):
            requests = [Request(prompt, 4, seed=seed) for prompt in PROMPTS]
            answers = []
            for way in (lean, None):
                engine._lean = way
                engine._llm.reset_prefix_cache()
                engine.reseed(3)
                answers.append(engine.generate(requests, sampling))
            engine._lean = lean
            assert answers[0] == answers[1]


def test_every_sequence_of_a_large_batch_decodes_in_a_graph(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")  # the other keeps its graphs elsewhere
    model = gpu_model()
    engine = build(model, enforce_eager=False, max_num_seqs=600)  # vLLM's own sizes end at 512
    engine.load_weights(weights(model))
    runner = engine._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    modes = {count: runner.cudagraph_dispatcher.dispatch(count, uniform_decode=True)[0].name for count in range(1, 601)}
    assert set(modes.values()) == {"FULL"}
    answers = engine.generate([Request(PROMPTS[0], 600)], SamplingSpec(max_tokens=24))
    gaps = [policy_gap(model, PROMPTS[0], completion) for completion in answers[0]]
    assert len(gaps) == 600
    assert float(torch.stack(gaps).mean()) < 0.03
    assert float(torch.stack(gaps).max()) < 0.3


@pytest.mark.parametrize("second_runner", [False, True])
def test_each_decode_step_is_vllms(build: Build, monkeypatch: pytest.MonkeyPatch, second_runner: bool) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(second_runner)))
    model, limit = gpu_model(), sys.getrecursionlimit()
    engine = build(model, max_num_seqs=16, extra={"num_gpu_blocks_override": 60})
    engine.load_weights(weights(model))
    lean = engine._lean
    assert lean is not None
    assert lean._steps is not None
    assert lean._steps.decoding is not None
    assert lean._core.scheduler.use_v2_model_runner == second_runner
    count = compare_steps(monkeypatch)
    sys.setrecursionlimit(20 * limit)  # the cache's free blocks are a chain, which deepcopy follows
    try:
        requests = [Request(prompt, 3, seed=11) for prompt in PROMPTS]
        engine.generate(requests, SamplingSpec(max_tokens=60, stop_token_ids=tuple(range(0, 250, 40))))
    finally:
        sys.setrecursionlimit(limit)
    assert min(count[name] for name in ("finished", "blocks")) > 2
    assert count["steps"] > 50
