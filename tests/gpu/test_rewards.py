"""Rewards on a GPU: a model gives what it gives on the CPU, and workers keep off a GPU that their rank uses."""

import subprocess

import pytest
import torch

from colocate_rl.rollout.rewards import Rewards
from colocate_rl.scoring.contract import RewardOptions
from tests.tiny import tiny_tokenizer
from tests.unit.reward_functions import by_row
from tests.unit.test_reward_models import COMPLETIONS, PROMPTS, reward_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def ask(device: str) -> torch.Tensor:
    rewards = Rewards([reward_model()], processing_classes=[tiny_tokenizer()])
    rewards.prepare(torch.device(device))
    assert next(rewards.functions[0].parameters()).device.type == device.partition(":")[0]  # type: ignore[union-attr]
    return rewards.score(PROMPTS, COMPLETIONS, [[1]] * len(PROMPTS), {})


def test_a_reward_model_gives_the_same_on_both_devices() -> None:
    on_gpu = ask("cuda:0")
    assert on_gpu.device.type == "cpu"
    torch.testing.assert_close(on_gpu, ask("cpu"), rtol=1e-3, atol=1e-3)


def test_workers_of_a_rank_with_a_gpu_hold_none_of_it() -> None:
    torch.ones(1, device="cuda:0")
    rewards = Rewards([by_row], options=RewardOptions(num_workers=2))
    try:
        rewards.prepare(torch.device("cuda:0"))
        table = rewards.score(["p"] * 2, ["a", "bb"], [[1], [2]], {"answer": [10, 20]})
        assert table[:, 0].tolist() == [11.0, 22.0]
        query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
        users = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
        assert rewards._pool is not None
        assert not {str(pid) for pid in rewards._pool.pids} & set(users)
    finally:
        rewards.close()
