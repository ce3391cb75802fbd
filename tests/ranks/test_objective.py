"""Statistics of the objective that span ranks, with ranks that cut their slices into different numbers of passes."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from colocate_rl.collectives import Collectives
from colocate_rl.engine.protocol import Completion
from colocate_rl.metrics import MetricBuffer
from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.training.logprobs import completion_statistics
from colocate_rl.training.losses import LossSettings
from colocate_rl.training.moving import EntropyBonus, MovingParts, MovingReference
from colocate_rl.training.objective import Objective
from colocate_rl.training.selection import EntropySelection
from tests.ranks.launch import Ranks
from tests.tiny import tiny_model

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

CPU = torch.device("cpu")
LENGTHS = (((3, 9), (2, 4), (1, 14), (5, 6)), ((2, 1), (1, 2), (3, 0), (1, 1)))
"""Prompt and completion tokens of each rank's rows: at 20 tokens a pass the first rank needs several, the other one."""
SHARE = 0.25
COEFFICIENT = 0.5


def slice_of(rank: int) -> RolloutBatch:
    draw = torch.Generator().manual_seed(rank)

    def ids(length: int) -> list[int]:
        drawn: list[int] = torch.randint(256, (length,), generator=draw).tolist()
        return drawn

    return RolloutBatch.from_rows(
        [ids(prompt) for prompt, _ in LENGTHS[rank]],
        [Completion(ids(length), [-5.0] * length, "stop") for _, length in LENGTHS[rank]],
        torch.randn(len(LENGTHS[rank]), generator=draw),
        keep=[True, True, True, rank == 0],
        pad_token_id=257,
    )


def make_objective(max_tokens: int | None, collectives: Collectives, bonus: EntropyBonus) -> Objective:
    return Objective(
        settings=LossSettings(loss_type="grpo", correction=False),
        temperature=1.0,
        chunk=8,
        autocast=contextlib.nullcontext,
        max_tokens=max_tokens,
        selection=EntropySelection(SHARE, collectives),
        bonus=bonus,
    )


def train_together(max_tokens: int | None) -> tuple[float, dict[str, torch.Tensor], float]:
    """On each rank: the loss of its slice, the gradients as DistributedDataParallel left them, the adapted weight."""
    collectives = Collectives(CPU)
    policy = tiny_model(layers=1)
    wrapped = nn.parallel.DistributedDataParallel(policy) if collectives.world_size > 1 else policy
    bonus = EntropyBonus(COEFFICIENT - 0.25, target=5.0, delta=0.25)
    bonus.observe(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool))
    bonus.end_step(collectives)  # a step below the target, after which the weight is COEFFICIENT and applied
    objective = make_objective(max_tokens, collectives, bonus)

    @contextlib.contextmanager
    def early() -> Iterator[Callable[[torch.Tensor], None]]:
        with wrapped.no_sync():  # type: ignore[operator]
            yield lambda part: part.backward()

    batch = slice_of(collectives.rank)
    passes = len(objective.micro_batches(batch))
    assert (passes > 1) == (max_tokens is not None and collectives.rank == 0)
    loss, _ = objective.loss(wrapped, policy, batch, 1.0, MetricBuffer(), early)
    loss.backward()
    MovingParts(collectives, bonus=bonus).end_step(policy, 1, MetricBuffer())
    gradients = {name: weight.grad for name, weight in policy.named_parameters() if weight.grad is not None}
    return loss.item(), gradients, bonus.coefficient


def expected_of_both() -> tuple[list[float], dict[str, torch.Tensor], float]:
    """The same from one process that sees both slices: losses, the mean of their gradients, and the entropy kept."""
    policy = tiny_model(layers=1)
    batches = [slice_of(0), slice_of(1)]
    found = [
        completion_statistics(policy, policy, each, temperature=1.0, chunk=99, autocast=contextlib.nullcontext)
        for each in batches
    ]
    entropies = torch.cat([each.entropy[batch.loss_mask] for each, batch in zip(found, batches, strict=True)])
    ordered = sorted(entropies.tolist())
    position = (len(ordered) - 1) * (1 - SHARE)
    bound = ordered[int(position)] + (ordered[int(position) + 1] - ordered[int(position)]) * (position % 1)
    losses, kept_entropies = [], []
    for each, batch in zip(found, batches, strict=True):
        kept = batch.loss_mask & (each.entropy >= bound)
        kept_entropies.append(each.entropy[kept])
        by_token = -batch.advantages[:, None] * (each.logprobs - each.logprobs.detach()).exp() * kept
        policy_loss = (by_token.sum(1) / batch.loss_mask.sum(1).clamp(min=1)).mean()
        losses.append(policy_loss - COEFFICIENT * each.entropy[kept].sum() / kept.sum().clamp(min=1))
    (sum(losses) / 2).backward()  # type: ignore[union-attr]
    gradients = {name: weight.grad for name, weight in policy.named_parameters() if weight.grad is not None}
    return [loss.item() for loss in losses], gradients, float(torch.cat(kept_entropies).detach().mean())


@pytest.mark.parametrize("max_tokens", [None, 20])
def test_selection_and_bonus_are_those_of_all_ranks(ranks: Callable[[int], Ranks], max_tokens: int | None) -> None:
    losses, gradients, entropy = expected_of_both()
    found = ranks(2).run(train_together, max_tokens)
    for (loss, mine, coefficient), expected in zip(found, losses, strict=True):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert mine.keys() == gradients.keys()
        for name, gradient in gradients.items():
            scale = float(gradient.abs().max())
            torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-4 * scale, msg=name)
        assert coefficient == (0.75 if entropy <= 5.0 else 0.25)


def select_on(rank_with_none: int) -> list[bool]:
    collectives = Collectives(CPU)
    entropy = torch.tensor([[0.5, 1.0, 2.0, 3.0]]) + collectives.rank
    mask = torch.full((1, 4), collectives.rank != rank_with_none)
    kept: list[bool] = EntropySelection(0.5, collectives).select(entropy, mask)[0].tolist()
    return kept


def test_a_rank_without_tokens_takes_part_and_keeps_none(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(select_on, 0) == [[False] * 4, [False, False, True, True]]
    assert ranks(2).run(select_on, 1) == [[False, False, True, True], [False] * 4]
    # Together: the upper half of 0.5 1 2 3 and 1.5 2 3 4.
    assert ranks(2).run(select_on, 2) == [[False, False, True, True], [False, True, True, True]]


def follow_together() -> list[torch.Tensor]:
    """Two steps of different data on each rank; the reference after each."""
    torch.manual_seed(0)
    policy, following = nn.Linear(3, 2), nn.Linear(3, 2)
    following.load_state_dict(policy.state_dict())
    following.requires_grad_(False)
    collectives = Collectives(CPU)
    wrapped = nn.parallel.DistributedDataParallel(policy)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    parts = MovingParts(collectives, MovingReference(following, 0.25, 1))
    seen = []
    for step in (1, 2):
        optimizer.zero_grad()
        wrapped(torch.full((1, 3), float(collectives.rank + step))).square().sum().backward()
        optimizer.step()
        parts.end_step(policy, step, MetricBuffer())
        seen += [following.weight.clone(), policy.weight.detach().clone()]
    return seen


def test_every_rank_has_the_same_reference(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).run(follow_together)
    for mine, other in zip(first, second, strict=True):
        assert torch.equal(mine, other)
    torch.manual_seed(0)
    start = nn.Linear(3, 2).weight.detach()
    after_one = 0.25 * first[1] + 0.75 * start
    torch.testing.assert_close(first[0], after_one)
    torch.testing.assert_close(first[2], 0.25 * first[3] + 0.75 * after_one)
    assert (first[2] - start).abs().max() > 1e-3
