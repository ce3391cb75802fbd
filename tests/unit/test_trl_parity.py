"""The same completions give what TRL 1.16 logged for them (recorded by ``benchmarks/trl_parity.py --record``)."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.trl_parity import CASES, differences, make_model, train

pytestmark = [pytest.mark.unit, pytest.mark.timeout(120)]

RECORD = Path(__file__).parents[1] / "parity/trl_1_16.json"
THEIRS: dict[str, list[dict[str, float]]] = json.loads(RECORD.read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("parity") / "model")


def test_every_case_was_recorded() -> None:
    assert THEIRS.keys() == CASES.keys()
    assert all(isinstance(steps, list) for steps in THEIRS.values())


@pytest.mark.parametrize("case", CASES)
def test_loss_gradient_and_figures_are_those_of_trl(case: str, model: Path, tmp_path: Path) -> None:
    mine = train("ours", CASES[case], model, tmp_path)
    gaps: dict[str, Any] = differences(mine, THEIRS[case])
    assert {"loss", "grad_norm", "reward"} <= gaps.keys()
    first = differences(mine[:1], THEIRS[case][:1])
    assert max(first["loss"], first["grad_norm"]) < 1e-5, "before any difference could grow"
    assert {name: gap for name, gap in gaps.items() if gap > 1e-4} == {}
