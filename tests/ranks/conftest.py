"""Ranks that all tests of this folder share."""

from collections.abc import Callable, Iterator

import pytest

from tests.ranks.launch import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """Gives the group of a world size; it is started by the first call that it gets."""
    groups: dict[int, Ranks] = {}

    def of_size(world_size: int) -> Ranks:
        if world_size not in groups:
            groups[world_size] = Ranks(world_size, tmp_path_factory.mktemp("ranks"))
        return groups[world_size]

    yield of_size
    for group in groups.values():
        group.kill()
