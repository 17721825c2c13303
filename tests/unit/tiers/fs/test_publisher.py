"""Written files appear in batches, by whichever thread is at it."""

import threading

import pytest

from kvstrata.tiers.fs.publisher import Publisher


class Sink:
    """Takes batches; the first one waits until it is let go."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()

    def take(self, batch: list[int]) -> None:
        self.batches.append(batch)
        self.has_begun.set()
        assert self.may_go_on.wait(60.0)


def busy(publisher: Publisher[int], sink: Sink) -> threading.Thread:
    """Return a thread that is publishing 0 at this moment."""
    thread = threading.Thread(target=publisher.publish, args=(0,))
    thread.start()
    assert sink.has_begun.wait(60.0)
    return thread


def test_what_others_leave_is_published_together_by_the_thread_that_is_at_it() -> None:
    sink = Sink()
    publisher = Publisher(sink.take, 3)
    thread = busy(publisher, sink)
    for i in (1, 2, 3):
        publisher.publish(i)  # returns at once: the other thread is held
    sink.may_go_on.set()
    thread.join(60.0)
    assert sink.batches == [[0], [1, 2, 3]]


@pytest.mark.parametrize("num_waiting_max", [0, 1])
def test_no_more_is_left_to_another_than_allowed(num_waiting_max: int) -> None:
    sink = Sink()
    publisher = Publisher(sink.take, num_waiting_max)
    thread = busy(publisher, sink)
    for i in range(num_waiting_max):
        publisher.publish(1 + i)
    late = threading.Thread(target=publisher.publish, args=(9,))
    late.start()
    late.join(0.05)
    assert late.is_alive()
    sink.may_go_on.set()
    thread.join(60.0)
    late.join(60.0)
    assert sorted(i for batch in sink.batches for i in batch) == [*range(1 + num_waiting_max), 9]


def test_after_an_unexpected_error_the_next_one_publishes_what_was_left() -> None:
    batches: list[list[int]] = []

    def take(batch: list[int]) -> None:
        batches.append(batch)
        if batch == [0]:
            publisher.publish(1)  # as another thread would, while this one is at it
            raise RuntimeError("unexpected")

    publisher = Publisher(take, 3)
    with pytest.raises(RuntimeError):
        publisher.publish(0)
    publisher.publish(2)
    assert batches == [[0], [1, 2]]
