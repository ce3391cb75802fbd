"""The example notebook, executed headless: run as it is, run twice, interrupted, and with several ranks."""

import base64
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from matplotlib.image import imread
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from colocate_rl.report import load_metrics, series
from examples.addition import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(580)]

REPOSITORY = Path(__file__).parents[2]
NOTEBOOK = REPOSITORY / "examples" / "grpo_notebook.ipynb"
NUM_STEPS = 3

INTERRUPT_BUILDING = """
import os, signal, threading
from colocate_rl.engine.vllm_engine import VllmEngine

build = VllmEngine._build


def interrupted_build(self):
    VllmEngine._build = build
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    build(self)


VllmEngine._build = interrupted_build
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The notebook's model after a shorter warm start, in the folder where the notebook looks for it."""
    folder = tmp_path_factory.mktemp("notebook") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_model, "NUM_STEPS", 150)
        make_model.make_model(folder, seed=1)
    return folder


class Notebook:
    """The notebook with other parameters, in a kernel of its own; cells are run by their id."""

    def __init__(self, out: Path, model: Path, **parameters: Any) -> None:
        out.mkdir()
        (out / "model").symlink_to(model)
        self.out = out
        self.book = nbformat.read(NOTEBOOK, as_version=4)
        self.client = NotebookClient(
            self.book,
            timeout=400,
            resources={"metadata": {"path": str(NOTEBOOK.parent)}},
        )
        settings = {"OUT": str(out), "NUM_STEPS": NUM_STEPS, **parameters}
        self.add("parameters-of-the-test", "\n".join(f"{name} = {value!r}" for name, value in settings.items()), at=2)

    def add(self, name: str, source: str, at: int | None = None) -> None:
        cell = nbformat.v4.new_code_cell(source, id=name)
        self.book.cells.insert(len(self.book.cells) if at is None else at, cell)

    def kernel(self) -> AbstractContextManager[None]:
        return self.client.setup_kernel(env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})

    def run(self, name: str) -> Any:
        index = next(place for place, cell in enumerate(self.book.cells) if cell.id == name)
        return self.client.execute_cell(self.book.cells[index], index)

    def run_all(self) -> dict[str, Any]:
        return {
            cell.id: self.client.execute_cell(cell, index)
            for index, cell in enumerate(self.book.cells)
            if cell.cell_type == "code"
        }

    def interrupt_after(self, num_steps: int) -> None:
        """Presses the stop button once a run, started from now on, has logged that many steps."""
        (self.out / "metrics.jsonl").unlink(missing_ok=True)

        def watch() -> None:
            for _ in range(8000):
                file = self.out / "metrics.jsonl"
                if file.exists() and len(file.read_text().splitlines()) >= num_steps:
                    os.kill(self.client.km.provisioner.pid, signal.SIGINT)  # type: ignore[union-attr]
                    return
                time.sleep(0.05)

        threading.Thread(target=watch, daemon=True).start()


def trained_steps(out: Path) -> list[int]:
    return [step for step, _ in series(load_metrics(out), "reward")]


def shown(cell: Any, kind: str) -> str:
    """All outputs of one kind that a cell shows."""
    return "\n".join(str(output.data[kind]) for output in cell.outputs if kind in output.get("data", {}))


@pytest.fixture
def notebook(tmp_path: Path, model: Path) -> Iterator[Notebook]:
    opened = Notebook(tmp_path / "out", model)
    opened.add("second-training", next(cell.source for cell in opened.book.cells if cell.id == "train"))
    with opened.kernel():
        yield opened


def test_it_runs_as_it_is_and_a_second_time(notebook: Notebook) -> None:
    cells = notebook.run_all()  # its last cell trains once more
    rewards = [reward for _, reward in series(load_metrics(notebook.out), "reward")]
    assert trained_steps(notebook.out) == list(range(1, NUM_STEPS + 1))
    table = shown(cells["second-training"], "text/html")
    for reward in rewards:
        assert f"<td>{reward:.6f}</td>" in table
    assert "tokens/s" in table
    (notebook.out / "curve.png").write_bytes(base64.b64decode(shown(cells["curve"], "image/png")))
    assert np.ptp(imread(notebook.out / "curve.png")[..., :3].mean(axis=-1)) > 0.5, "something is drawn"
    assert "completion" in shown(cells["samples"], "text/html")
    assert (notebook.out / "report.html").is_file()
    assert (notebook.out / "model.safetensors").is_file()


def test_interrupts_leave_the_kernel_usable(notebook: Notebook) -> None:
    for name in ("parameters", "parameters-of-the-test", "model", "functions"):
        notebook.run(name)
    notebook.add("many-steps", "NUM_STEPS = 10_000")
    notebook.run("many-steps")
    notebook.interrupt_after(2)
    with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
        notebook.run("train")
    assert len(trained_steps(notebook.out)) >= 2

    notebook.add("few-steps", f"NUM_STEPS = {NUM_STEPS}")
    notebook.run("few-steps")
    notebook.run("train")
    assert trained_steps(notebook.out) == list(range(1, NUM_STEPS + 1))

    notebook.add("interrupt-building", INTERRUPT_BUILDING)
    notebook.run("interrupt-building")
    with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
        notebook.run("train")
    (notebook.out / "metrics.jsonl").unlink()
    notebook.run("second-training")
    assert trained_steps(notebook.out) == list(range(1, NUM_STEPS + 1))


def test_several_ranks_from_the_same_notebook(tmp_path: Path, model: Path) -> None:
    notebook = Notebook(tmp_path / "out", model, NUM_RANKS=2, NUM_ENGINES=2)
    with notebook.kernel():
        notebook.run_all()
    records = load_metrics(notebook.out)
    assert trained_steps(notebook.out) == list(range(1, NUM_STEPS + 1))
    assert [record["engine/1/prompts"] for record in records if "reward" in record] == [16] * NUM_STEPS


def test_it_is_kept_without_outputs() -> None:
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in code] == [[]] * len(code)
    assert [cell.execution_count for cell in code] == [None] * len(code)
