"""The front of each class is kept between walks, as long as nothing happens to it."""

import pytest

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import Run
from kvstrata.policies.class_queues import ClassQueues, Standing, VictimWalk
from kvstrata.policies.reuse_curve import EDGES_S

RATES = [[1.0] * len(EDGES_S), [2.0] * len(EDGES_S)]


def tracked(queues: ClassQueues, name: bytes, class_idx: int = 0, parent: Run | None = None) -> Run:
    """Track a run of one chunk."""
    run = Run([OffloadKey(name)], [0], None)
    if parent is not None:
        run.parent, parent.num_children = parent, parent.num_children + 1
    queues.add(run, 1, class_idx)
    return run


def first(
    queues: ClassQueues, rates: list[list[float]] = RATES, now_s: float = 0.0
) -> tuple[float, Run] | None:
    """Return what a walk finds first, and end it."""
    walk = VictimWalk(queues, rates, now_s)
    best = walk.best()
    walk.end()
    queues.check()
    return best


def use(queues: ClassQueues, run: Run, class_idx: int) -> None:
    """Let a request use a run."""
    assert isinstance(run.state, Standing)
    queues.use(run, run.state, class_idx)


@pytest.mark.parametrize("class_idx", [0, 1])
def test_a_front_that_is_used_makes_way_for_the_next(class_idx: int) -> None:
    queues = ClassQueues()
    old, young = tracked(queues, b"old"), tracked(queues, b"young")
    assert first(queues) == (1.0, old)
    use(queues, old, class_idx)
    assert first(queues) == (1.0, young)


def test_a_front_that_gets_a_child_makes_way_for_it() -> None:
    queues = ClassQueues()
    parent = tracked(queues, b"parent")
    assert first(queues) == (1.0, parent)
    child = tracked(queues, b"child", 1, parent)
    assert first(queues) == (2.0, child)


def test_a_front_that_is_forgotten_makes_way_for_the_next() -> None:
    queues = ClassQueues()
    old, young = tracked(queues, b"old"), tracked(queues, b"young")
    assert first(queues) == (1.0, old)
    queues.forget(old)
    assert first(queues) == (1.0, young)


def test_a_front_that_is_held_makes_way_until_it_is_not() -> None:
    queues = ClassQueues()
    old, young = tracked(queues, b"old"), tracked(queues, b"young")
    assert first(queues) == (1.0, old)
    old.num_holds = 1
    assert first(queues) == (1.0, young)
    old.num_holds = 0
    assert first(queues) == (1.0, old)


def test_a_front_is_worth_what_its_age_and_the_latest_rates_say() -> None:
    queues = ClassQueues()
    run = tracked(queues, b"run")
    rates = [[float(age) for age in range(len(EDGES_S))]]
    for age, begins_s in enumerate(EDGES_S):
        assert first(queues, rates, now_s=begins_s) == (float(age), run)
    assert first(queues, [[7.0] * len(EDGES_S)], now_s=EDGES_S[-1]) == (7.0, run)
