"""Written files appear some at a time, and the rest when a thread has nothing else to do."""

import threading
from collections.abc import Iterator

import pytest
from typing_extensions import override

from kvstrata.core.clock import SystemClock
from kvstrata.tiers.fs.publisher import Publisher
from kvstrata.tiers.fs.workers import Lane, Workers


class Publish:
    """Publishes one number, after it has been let go."""

    def __init__(self, publisher: Publisher[int], number: int) -> None:
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()
        self._publisher = publisher
        self._number = number

    @override
    def __str__(self) -> str:
        return f"publishing {self._number}"

    def run(self, page: memoryview) -> None:
        del page
        self.has_begun.set()
        assert self.may_go_on.wait(60.0)
        self._publisher.publish(self._number)

    def fail(self) -> None:
        """Do nothing."""


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(1, "test", SystemClock())
    yield workers
    assert workers.close(60.0)


def publish(workers: Workers, publisher: Publisher[int], *numbers: int) -> None:
    """Publish numbers as stores of one thread do, one right after the other."""
    operations = [Publish(publisher, number) for number in numbers]
    workers.submit(Lane.STORE, iter(operations), len(operations))
    for each in operations:
        assert each.has_begun.wait(60.0)
        each.may_go_on.set()
    while not workers.is_idle():
        threading.Event().wait(0.001)


def test_written_files_appear_so_many_at_a_time_and_the_rest_at_the_end(workers: Workers) -> None:
    batches: list[list[int]] = []
    publisher = Publisher(batches.append, 3, workers)
    publish(workers, publisher, *range(8))
    assert batches == [[0, 1, 2], [3, 4, 5], [6, 7]]
    publish(workers, publisher, 8)
    assert batches[3:] == [[8]]


def test_nothing_is_published_twice_where_the_last_ones_made_up_the_number(
    workers: Workers,
) -> None:
    batches: list[list[int]] = []
    publisher = Publisher(batches.append, 2, workers)
    publish(workers, publisher, 0, 1)
    publish(workers, publisher, 2)
    assert batches == [[0, 1], [2]]


def test_with_one_at_a_time_each_is_published_at_once(workers: Workers) -> None:
    batches: list[list[int]] = []
    publisher = Publisher(batches.append, 1, workers)
    publisher.publish(0)
    assert batches == [[0]]
    publisher.publish(1)
    assert batches == [[0], [1]]


def test_after_an_unexpected_error_others_are_published(workers: Workers) -> None:
    batches: list[list[int]] = []

    def take(batch: list[int]) -> None:
        if batch == [0, 1]:
            raise RuntimeError("unexpected")
        batches.append(batch)

    publisher = Publisher(take, 2, workers)
    publish(workers, publisher, *range(5))
    assert batches == [[2, 3], [4]]
