"""Two ranks train one adapter; an engine of two tensor-parallel shards takes its slices of it, both ways."""

from pathlib import Path

import pytest

from tests.torchrun import run_two_ranks

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(420)]


def test_an_engine_of_two_shards_follows_the_adapter_of_two_ranks(tmp_path: Path) -> None:
    ranks = run_two_ranks("tests.engine.lora_two_ranks", tmp_path, OMP_NUM_THREADS="1")
    for way in ("merged", "adapter"):
        assert ranks[0][way]["adapter"] == ranks[1][way]["adapter"]
        logs = ranks[0][way]["logs"]
        assert len(logs) == 4
        assert logs[0]["kl"] == 0.0
        assert logs[-1]["kl"] > 1e-3  # the adapter moved far enough for a stale engine to show
        assert all(log["sampling/sampling_logp_difference/mean"] < 1e-3 for log in logs)
