"""The garbage collector during a run."""

import gc
import weakref

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from colocate_rl.hooks import SteadyHeap

pytestmark = pytest.mark.unit


class Part:
    """One end of a cycle."""

    other: "Part"


def test_what_a_run_has_made_is_left_alone_until_it_ends() -> None:
    heap, told = SteadyHeap(), (TrainingArguments, TrainerState(), TrainerControl())
    before = gc.get_freeze_count()
    heap.on_step_end(*told)
    frozen = gc.get_freeze_count()
    assert frozen > before + 1000
    heap.on_step_end(*told)
    assert gc.get_freeze_count() <= frozen, "only once"
    cycle = Part()
    cycle.other = cycle
    del cycle
    assert gc.collect() > 0, "later garbage is still collected"
    heap.on_train_end(*told)
    assert gc.get_freeze_count() == 0


def test_an_interrupted_run_can_be_thawed() -> None:
    heap = SteadyHeap()
    cycle = Part()
    cycle.other = cycle
    freed: list[str] = []
    weakref.finalize(cycle, freed.append, "freed")
    heap.on_step_end(TrainingArguments, TrainerState(), TrainerControl())
    del cycle
    gc.collect()
    assert not freed
    heap.thaw()
    heap.thaw()
    gc.collect()
    assert freed
