"""Two real ranks with real engines: K=1, K=2 and one engine of two shards agree, and a longer run stays exact."""

from typing import Any

import pytest
import torch

from tests.engine.conftest import policy_logprobs, prompts
from tests.tiny import tiny_model
from tests.torchrun import run_two_ranks

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_two_ranks("tests.engine.two_ranks", tmp_path_factory.mktemp("two_ranks"), OMP_NUM_THREADS="1")


def rollout(ranks: Results, scenario: str, number: int) -> list[list[int]]:
    """All ranks' rows of one rollout, as sets of ids."""
    return sorted(row for rank in ranks for row in rank[scenario]["rollouts"][number])


def test_completions_under_request_seeds_do_not_depend_on_the_engines(ranks: Results) -> None:
    assert rollout(ranks, "K=1", 0) == rollout(ranks, "K=2", 0) == rollout(ranks, "t=2", 0)
    assert len({tuple(row) for row in rollout(ranks, "K=2", 0)}) > 12  # of 16: diverse
    assert rollout(ranks, "K=2", 0) != rollout(ranks, "K=2", 1)


def test_first_gradients_do_not_depend_on_the_engines(ranks: Results) -> None:
    for rank in ranks:
        for name, gradient in rank["K=1"]["gradients"].items():
            wanted = torch.tensor(gradient)
            for other in ("K=2", "t=2"):
                torch.testing.assert_close(torch.tensor(rank[other]["gradients"][name]), wanted, rtol=1e-5, atol=1e-5)
    total = sum(abs(value) for gradient in ranks[0]["K=1"]["gradients"].values() for value in gradient)
    assert total > 1e-3


def test_ranks_end_with_the_same_weights(ranks: Results) -> None:
    for scenario in ranks[0]:
        assert ranks[0][scenario]["weights"] == ranks[1][scenario]["weights"], scenario


def test_two_shards_give_the_greedy_text_and_logprobs_of_one(ranks: Results) -> None:
    whole = ranks[0]["K=1"]["greedy"]
    for rank in ranks:
        for (ids, logprobs), (ids_2, logprobs_2) in zip(whole, rank["t=2"]["greedy"], strict=True):
            assert ids == ids_2
            torch.testing.assert_close(torch.tensor(logprobs_2), torch.tensor(logprobs), rtol=0, atol=1e-4)
    model = tiny_model()
    for prompt, (ids, logprobs) in zip(prompts(6), whole, strict=True):
        policy = policy_logprobs(model, prompt, ids)
        torch.testing.assert_close(torch.tensor(logprobs).double(), policy, rtol=0, atol=1e-4)


def test_gap_stays_small_and_on_policy_ratio_is_one_at_every_step(ranks: Results) -> None:
    logs = [log for log in ranks[0]["long"]["logs"] if "step_time" in log]
    assert len(logs) == 20
    for log in logs:
        assert log["sampling/sampling_logp_difference/mean"] <= 1e-3
        assert log["time/generate_s"] >= 0
        assert log["num_tokens"] > 0
    # Two passes over each generation batch: one sync for both.
    assert ranks[0]["long"]["loads"] == ranks[1]["long"]["loads"] == 10
    assert all(log["policy_ratio/max_deviation"] == 0 for log in logs[::2])
    assert all(log["policy_ratio/max_deviation"] > 1e-4 for log in logs[1::2])  # the second pass sees moved weights


def test_every_engine_worked_and_trainer_collectives_still_do(ranks: Results) -> None:
    for scenario, engines in (("K=1", 1), ("K=2", 2), ("t=2", 1)):
        log = next(log for log in ranks[0][scenario]["logs"] if "step_time" in log)
        prompts_answered = [log[f"engine/{engine}/prompts"] for engine in range(engines)]
        assert prompts_answered == [4 / engines] * engines
        assert f"engine/{engines}/prompts" not in log
        assert all(rank[scenario]["group works"] for rank in ranks)
