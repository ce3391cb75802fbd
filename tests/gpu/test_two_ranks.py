"""Two NCCL ranks with DistributedDataParallel, K=2 and then one engine of two shards, on each other's GPU."""

from typing import Any

import pytest

from tests.gpu.conftest import needs_two_gpus
from tests.torchrun import run_two_ranks

pytestmark = [pytest.mark.gpu, needs_two_gpus, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_two_ranks("tests.gpu.two_ranks", tmp_path_factory.mktemp("two_ranks"), timeout_s=580)


@pytest.mark.parametrize("mode", ["K=2", "t=2"])
def test_ranks_stay_equal_and_close_to_their_engines(ranks: list[dict[str, Any]], mode: str) -> None:
    assert ranks[0][mode]["weights"] == ranks[1][mode]["weights"]
    for rank, result in enumerate(ranks):
        assert result[mode]["device"] == rank
        assert result[mode]["group works"]
        assert result[mode]["engine on"] == [1 - rank]
    logs = ranks[0][mode]["logs"]
    assert len(logs) == 20
    assert max(log["sampling/sampling_logp_difference/mean"] for log in logs) < 0.03
    assert logs[-1]["reward"] > logs[0]["reward"]
