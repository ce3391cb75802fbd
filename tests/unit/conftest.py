"""Settings for the tests of one process."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are tiny: more threads only wait for each other, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_page(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing a page takes longer than the runs of these tests; the report's own tests draw it."""
    if "report" not in request.module.__name__:
        monkeypatch.setattr("colocate_rl.runreport.write_page", lambda folder: folder)
