"""Worker of test_debug_levels.py: only rank 0 has an engine, and all ranks make process groups around its life."""

import torch
import torch.distributed as dist  # noqa: TID251

from colocate_rl.engine.protocol import Request, SamplingSpec
from colocate_rl.engine.vllm_engine import VllmEngine
from tests.engine.conftest import engine_spec, prompts, weights
from tests.tiny import tiny_model


def group_works(ranks: list[int]) -> None:
    group = dist.new_group(ranks)
    if dist.get_rank() in ranks:
        one = torch.ones(1)
        dist.all_reduce(one, group=group)
        assert one.item() == len(ranks)


def main() -> None:
    dist.init_process_group("gloo")
    group_works([0, 1])
    model = tiny_model()
    engine = VllmEngine(engine_spec(model)) if dist.get_rank() == 0 else None
    group_works([0, 1])
    if engine is not None:
        engine.load_weights(weights(model))
        engine.generate([Request(prompts(1)[0], 2)], SamplingSpec(max_tokens=4))
    group_works([0, 1])
    group_works([1])
    if engine is not None:
        engine.close()
    group_works([0, 1])
    dist.barrier()
    dist.destroy_process_group()
    print("all groups worked", flush=True)


if __name__ == "__main__":
    main()
