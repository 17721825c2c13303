"""Who may load when: no request waits for ever for blocks that another one holds for it."""

import pytest

from kvstrata.connector import KVGroup
from kvstrata.connector.admission import LoadGate
from tests.toy_engine import ToyEngine, ToySettings


def hold_and_wait(*, knows_capacity: bool) -> ToyEngine:
    """12 blocks, two requests that need 10 each, and 5 of them can be loaded."""
    settings = ToySettings(
        (KVGroup(4),), num_blocks=13, tokens_per_step=40, knows_capacity=knows_capacity
    )
    engine = ToyEngine(settings)
    for name, start in (("a", 0), ("b", 100)):
        engine.add(f"warm-{name}", range(start, start + 20))
        engine.finish()
    for name, start in (("a", 0), ("b", 100)):
        engine.add(name, [*range(start, start + 20), *range(start + 50, start + 69)])
    return engine


def test_two_requests_that_load_a_part_both_finish() -> None:
    # C04.
    engine = hold_and_wait(knows_capacity=True)
    before = engine.num_steps
    engine.finish()
    assert engine.num_steps - before <= 50
    assert all(engine.finished[name].num_tokens_computed == 19 for name in "ab")


def test_without_a_known_capacity_they_hold_each_other_up() -> None:
    # Shows that the test above can fail.
    engine = hold_and_wait(knows_capacity=False)
    with pytest.raises(AssertionError, match="not done"):
        engine.run(num_steps_max=50)


def test_one_request_may_always_load() -> None:
    gate = LoadGate(10)
    assert gate.may_start("large", 50)
    gate.on_load("large", 50)
    assert not gate.may_start("small", 1)
    gate.on_scheduled("large")
    assert not gate.may_start("small", 1)
    gate.on_prefilled("large")
    assert gate.may_start("small", 1)


def test_a_request_whose_load_failed_waits_until_loaded_ones_have_run() -> None:
    gate = LoadGate(None)
    gate.on_load("failed", 10)
    gate.on_load("other", 10)
    gate.forget("failed")
    assert not gate.may_compute("failed")
    assert not gate.may_start("third", 1)
    gate.on_scheduled("other")
    assert gate.may_compute("failed")
    assert not gate.may_start("third", 1)
    gate.on_scheduled("failed")
    assert gate.may_start("third", 1)


def test_a_request_that_ends_holds_nobody_up() -> None:
    gate = LoadGate(10)
    gate.on_load("other", 10)
    assert not gate.may_compute("failed")
    gate.forget("other")
    gate.forget("failed")
    assert gate.may_start("third", 10)
    assert gate.num_held == 0
