"""Who runs copies: each task ends in one result, in the order that urgency says."""

import threading

import pytest

from kvstrata.connector.messages import BlockCopies, CopyJob, CopyResult
from kvstrata.connector.transfers import InlineTransfers, Task, TransferThread, Urgency
from kvstrata.core.errors import OffloadError
from kvstrata.core.keys import JobId


def job(job_id: int) -> CopyJob:
    return CopyJob(JobId(job_id), "r", [BlockCopies(0, [1, 2], [job_id, job_id + 100], [0, 0])])


class Recorder:
    """Makes tasks that note their order; the first one waits until it is let go."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.started = threading.Event()
        self.let_go = threading.Event()

    def task(self, job_id: int) -> Task:
        def run() -> frozenset[int]:
            self.order.append(job_id)
            return frozenset()

        return Task(job(job_id), run)

    def blocker(self, job_id: int) -> Task:
        def run() -> frozenset[int]:
            self.started.set()
            assert self.let_go.wait(30)
            return frozenset()

        return Task(job(job_id), run)


def test_loads_run_before_stores_and_awaited_ones_before_all() -> None:
    recorder = Recorder()
    thread = TransferThread("test")
    thread.submit(recorder.blocker(1), Urgency.STORE)
    assert recorder.started.wait(30)
    for job_id, urgency in [(2, Urgency.STORE), (3, Urgency.STORE), (4, Urgency.LOAD)]:
        thread.submit(recorder.task(job_id), urgency)
    waiter = threading.Thread(target=thread.wait, args=([JobId(3)], 30))
    waiter.start()
    while waiter.is_alive() and not thread.is_awaited(JobId(3)):
        pass
    recorder.let_go.set()
    waiter.join()
    assert recorder.order[0] == 3
    thread.wait([JobId(i) for i in range(9)], 30)
    assert recorder.order == [3, 4, 2]
    assert {result.job_id for result in thread.take_results()} == {1, 2, 3, 4}
    assert thread.take_results() == []
    assert thread.close(30) == set()


def test_with_two_threads_no_load_waits_for_a_store_and_awaited_stores_run_first() -> None:
    recorder = Recorder()
    threads = TransferThread("test", num_threads=2)
    threads.submit(recorder.blocker(1), Urgency.STORE)
    assert recorder.started.wait(30)
    threads.submit(recorder.task(2), Urgency.LOAD)
    assert threads.wait([JobId(2)], 30) == set()
    threads.submit(recorder.task(3), Urgency.STORE)
    threads.submit(recorder.task(4), Urgency.STORE)
    waiter = threading.Thread(target=threads.wait, args=([JobId(4)], 30))
    waiter.start()
    while waiter.is_alive() and not threads.is_awaited(JobId(4)):
        pass
    recorder.let_go.set()
    waiter.join()
    assert threads.close(30) == set()
    assert recorder.order == [2, 4, 3]
    assert {result.job_id for result in threads.take_results()} == {1, 2, 3, 4}


def test_a_task_that_raises_fails_with_all_its_slots_and_the_next_one_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def explode() -> frozenset[int]:
        raise RuntimeError("no such block")

    recorder = Recorder()
    for transfers in (TransferThread("test"), InlineTransfers()):
        transfers.submit(Task(job(7), explode), Urgency.LOAD)
        transfers.submit(recorder.task(8), Urgency.LOAD)
        transfers.wait([JobId(7), JobId(8)], 30)
        results = transfers.take_results()
        assert results == [CopyResult(JobId(7), frozenset({7, 107})), CopyResult(JobId(8))]
        transfers.close(30)
    assert recorder.order == [8, 8]
    assert "job 7 failed" in caplog.text


def test_waiting_names_the_jobs_that_do_not_end_in_time() -> None:
    recorder = Recorder()
    thread = TransferThread("test")
    thread.submit(recorder.blocker(1), Urgency.STORE)
    assert recorder.started.wait(30)
    assert thread.wait([JobId(1), JobId(5)], 0.01) == {1}
    assert thread.close(0.01) == {1}
    recorder.let_go.set()
    assert thread.close(30) == set()


def test_closing_runs_what_is_queued_and_takes_nothing_more() -> None:
    recorder = Recorder()
    thread = TransferThread("test")
    for job_id in range(20):
        thread.submit(recorder.task(job_id), Urgency.STORE)
    assert thread.close(30) == set()
    assert recorder.order == list(range(20))
    with pytest.raises(OffloadError, match="closed"):
        thread.submit(recorder.task(99), Urgency.STORE)


def test_waiting_for_results_returns_when_there_is_nothing_to_wait_for() -> None:
    thread = TransferThread("test")
    thread.wait_for_results(30)
    recorder = Recorder()
    thread.submit(recorder.task(1), Urgency.LOAD)
    thread.wait_for_results(30)
    assert [result.job_id for result in thread.take_results()] == [1]
    thread.close(30)
