"""Copies between GPUs as one piece of work. The driver's part is played by memmove; tests/gpu has the real one."""

import ctypes

import pytest
import torch

from colocate_rl.engine.peer import PeerCopies

pytestmark = pytest.mark.unit


def moved(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> list[int]:
    """Copies with memmove; returns the bytes of each copy."""
    sizes = []

    def copy(target: int, source: int, num_bytes: int) -> None:
        ctypes.memmove(target, source, num_bytes)
        sizes.append(num_bytes)

    PeerCopies(targets, sources).queue(copy)
    return sizes


def test_every_kind_of_source_arrives() -> None:
    engine = torch.full((6, 4), 7.0, dtype=torch.bfloat16)
    policy = torch.randn(4, 3)
    bits = torch.randn(3, 4).bfloat16()
    sizes = moved([engine[:3], engine[3:]], [bits, policy.t()])  # one as it is; one cast and made contiguous
    assert sizes == [24, 24]
    assert torch.equal(engine[:3], bits)
    assert torch.equal(engine[3:], policy.t().bfloat16())


def test_a_slice_of_columns_is_not_taken_for_its_neighbours() -> None:
    policy, engine = torch.randn(4, 6), torch.zeros(4, 3)
    moved([engine], [policy[:, 3:]])
    assert torch.equal(engine, policy[:, 3:])


@pytest.mark.parametrize(
    ("targets", "sources"),
    [
        ([torch.empty(2)], [torch.empty(2)]),  # nothing on a GPU
        ([torch.empty(2, device="meta")], [torch.empty(2)]),
        ([torch.empty(2, 2).t()], [torch.empty(2, 2)]),  # a target with gaps
        ([], []),
    ],
)
def test_other_copies_stay_with_torch(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    assert PeerCopies.between(targets, sources) is None
