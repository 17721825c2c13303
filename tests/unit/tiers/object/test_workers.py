import threading
from collections.abc import Iterator

import pytest

from kvstrata.tiers.object.workers import Lane, WorkerPool

PATIENCE_S = 30.0


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool("test", 4, 2, {Lane.STORE: 1})
    yield pool
    assert pool.close(PATIENCE_S)


class Gate:
    """Tasks that say that they began, and end when they are let."""

    def __init__(self) -> None:
        self.began = threading.Semaphore(0)
        self.open = threading.Event()

    def __call__(self) -> None:
        self.began.release()
        assert self.open.wait(PATIENCE_S)

    def wait_for(self, count: int) -> bool:
        return all(self.began.acquire(timeout=PATIENCE_S) for _ in range(count))


def test_as_many_tasks_run_at_one_time_as_there_are_threads(pool: WorkerPool) -> None:
    gate = Gate()
    for _ in range(6):
        pool.submit(Lane.PROBE, gate)
    assert gate.wait_for(4)
    assert pool.num_running() == 4
    gate.open.set()
    assert gate.wait_for(2)


def test_loads_and_stores_are_bounded_together_and_stores_on_their_own(pool: WorkerPool) -> None:
    stores, loads, probes = Gate(), Gate(), Gate()
    for _ in range(3):
        pool.submit(Lane.STORE, stores)
    assert stores.wait_for(1)
    for _ in range(3):
        pool.submit(Lane.LOAD, loads)
    assert loads.wait_for(1)
    pool.submit(Lane.PROBE, probes)
    assert probes.wait_for(1)
    assert pool.num_running() == 3
    for gate in (stores, loads, probes):
        gate.open.set()


def test_no_thread_is_woken_for_a_task_that_may_not_run() -> None:
    pool = WorkerPool("bounded", 4, 4, {Lane.STORE: 1})
    gate = Gate()
    pool.submit(Lane.STORE, gate, gate, gate)
    assert gate.wait_for(1)
    assert [each.name for each in threading.enumerate() if "bounded" in each.name] == ["bounded-0"]
    gate.open.set()
    assert gate.wait_for(2)
    assert pool.close(PATIENCE_S)


def test_a_panic_ends_the_task_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Panic(BaseException):
        """As a foreign library raises it: no Exception."""

    def fail() -> None:
        raise Panic

    pool = WorkerPool("test", 1, 1, {})
    done = threading.Event()
    pool.submit(Lane.LOAD, fail)
    pool.submit(Lane.LOAD, done.set)
    assert done.wait(PATIENCE_S)
    assert "Panic" in caplog.text
    assert pool.close(PATIENCE_S)


def test_what_a_hold_kept_back_runs_on_as_many_threads_as_may(pool: WorkerPool) -> None:
    gate = Gate()
    pool.hold(Lane.LOAD)
    pool.submit(Lane.LOAD, gate, gate)
    pool.release(Lane.LOAD)
    assert gate.wait_for(2)
    gate.open.set()


def test_loads_go_first() -> None:
    pool = WorkerPool("test", 1, 1, {})
    gate, done, order = Gate(), threading.Event(), list[str]()
    pool.submit(Lane.UPKEEP, gate)
    assert gate.wait_for(1)
    pool.submit(Lane.STORE, lambda: order.append("store"))
    pool.submit(Lane.PROBE, lambda: order.append("probe"))
    pool.submit(Lane.LOAD, lambda: order.append("load"))
    pool.submit(Lane.UPKEEP, done.set)
    gate.open.set()
    assert done.wait(PATIENCE_S)
    assert order == ["load", "probe", "store"]
    assert pool.close(PATIENCE_S)


def test_a_held_lane_waits_and_the_others_go_on(pool: WorkerPool) -> None:
    stored, probed = threading.Event(), threading.Event()
    pool.hold(Lane.STORE)
    pool.hold(Lane.STORE)
    pool.submit(Lane.STORE, stored.set)
    pool.release(Lane.STORE)
    pool.submit(Lane.PROBE, probed.set)
    assert probed.wait(PATIENCE_S)
    assert not stored.is_set()
    pool.release(Lane.STORE)
    assert stored.wait(PATIENCE_S)


def test_a_later_task_runs_when_its_time_has_come(pool: WorkerPool) -> None:
    done = threading.Event()
    pool.submit(Lane.PROBE, done.set, delay_s=0.01)
    assert done.wait(PATIENCE_S)


def test_a_task_that_fails_is_logged_and_the_thread_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = WorkerPool("test", 1, 1, {})
    done = threading.Event()
    pool.submit(Lane.PROBE, list[None]().pop)
    pool.submit(Lane.PROBE, done.set)
    assert done.wait(PATIENCE_S)
    assert "IndexError" in caplog.text
    assert pool.close(PATIENCE_S)


def test_close_drops_what_waits_and_lets_what_runs_end() -> None:
    pool = WorkerPool("test", 1, 1, {})
    gate, dropped = Gate(), threading.Event()
    pool.submit(Lane.PROBE, gate)
    assert gate.wait_for(1)
    pool.submit(Lane.PROBE, dropped.set)
    pool.submit(Lane.PROBE, dropped.set, delay_s=0.001)
    assert not pool.close(0.0)
    gate.open.set()
    assert pool.close(PATIENCE_S)
    pool.submit(Lane.PROBE, dropped.set)
    assert not dropped.is_set()
