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
