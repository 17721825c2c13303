"""What several ranks together say of a job, on an injected clock."""

from kvstrata.connector.messages import CopyResult, WorkerOutput
from kvstrata.core.keys import JobId
from tests.toy_engine import Status, ToyEngine, ToySettings, ToyStep


class Clock:
    """Stands still until told otherwise."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s

    def wall_s(self) -> float:
        return self.time_s


def loading(num_ranks: int) -> tuple[ToyEngine, Clock]:
    """An engine with one load in flight, which no rank has run."""
    clock = Clock()
    engine = ToyEngine(ToySettings(num_ranks=num_ranks), clock=clock)
    engine.add("warm", range(40))
    engine.finish()
    request = engine.add("r", range(40))
    while request.status is not Status.LOADING:
        engine.step()
    return engine, clock


def test_ranks_that_report_different_jobs_end_only_what_all_have_reported() -> None:
    # C08: four ranks report different jobs, in different orders, and one reports nothing at all.
    clock = Clock()
    engine = ToyEngine(ToySettings(num_ranks=4, num_blocks=90, tokens_per_step=200), clock=clock)
    for i in range(4):
        engine.add(f"r{i}", range(100 * i, 100 * i + 8), 9)
    engine.step()
    jobs = [job.job_id for job in engine.messages[-1].stores]
    assert len(jobs) == 4
    a, b, c, d = jobs

    def report(rank: int, *job_ids: JobId) -> WorkerOutput:
        return WorkerOutput(rank, [CopyResult(job_id) for job_id in job_ids])

    connector = engine.connector
    connector.update_connector_output([report(0, c, a, b), report(1, b, c), report(2, b, d, c)])
    assert connector.get_stats()["open_stores"] == 4
    connector.update_connector_output([report(3, c), report(3, b)])
    assert connector.get_stats()["open_stores"] == 2
    assert engine.manager.get_stats()["stored_chunks"] == 4
    clock.time_s += 61
    connector.update_connector_output([])
    assert connector.get_stats()["overdue_jobs"] == 2
    connector.update_connector_output([report(1, a, d), report(2, a), report(3, a, d)])
    assert connector.get_stats()["open_stores"] == 1
    connector.update_connector_output([report(0, d)])
    assert engine.manager.get_stats()["stored_chunks"] == 8


def test_outcomes_come_in_the_order_in_which_the_loads_started() -> None:
    engine = ToyEngine(ToySettings(num_ranks=2, num_blocks=90, tokens_per_step=200))
    for i in range(3):
        engine.add(f"warm{i}", range(100 * i, 100 * i + 20))
    engine.finish()
    for i in range(3):
        engine.add(f"r{i}", range(100 * i, 100 * i + 20))
    engine.step()
    for rank, order in enumerate(([2, 0, 1], [1, 2, 0])):
        transfers = engine.transfers[rank]
        for task in [transfers.queued[i] for i in order]:
            transfers.run(task)
    engine.collect()
    assert [outcome.req_id for outcome in engine.outcomes] == ["r0", "r1", "r2"]
    engine.finish()


def test_a_load_that_a_rank_never_reports_fails_at_the_deadline() -> None:
    # C08. The chunks stay pinned and the blocks fenced, since the silent rank may still copy.
    engine, clock = loading(2)
    engine.transfers[0].run_all()
    engine.collect()
    assert engine.outcomes == []
    clock.time_s += 61
    engine.collect()
    (outcome,) = engine.outcomes
    assert (outcome.num_computed_tokens, outcome.num_failed_tokens) == (0, 39)
    assert engine.manager.get_stats()["num_pinned"] == 10
    assert engine.transfers[1].queued
    # Every step waits for it on the rank that is late, before anything is written.
    (load,) = engine.messages[-1].loads
    message = engine.connector.build_connector_meta(ToyStep({}, 1))
    assert message.flush_job_ids == [load.job_id]
    engine.step()
    assert engine.messages[-1].flush_job_ids == [load.job_id]
    assert engine.transfers[1].num_awaited == 1
    engine.finish()
    assert len(engine.outcomes) == 1


def test_a_store_that_a_rank_never_reports_keeps_its_slots() -> None:
    clock = Clock()
    engine = ToyEngine(ToySettings(num_ranks=2), clock=clock)
    engine.add("r", range(8), 9)
    engine.step()
    engine.transfers[0].run_all()
    clock.time_s += 61
    engine.collect()
    assert engine.manager.get_stats()["num_writing"] == 2
    assert engine.connector.get_stats()["overdue_jobs"] == 1
    engine.transfers[1].run_all()
    engine.collect()
    assert engine.manager.get_stats()["num_writing"] == 0
    engine.finish()


def test_results_of_unknown_jobs_and_second_reports_change_nothing() -> None:
    engine, _ = loading(2)
    (job,) = engine.messages[-1].loads
    twice = WorkerOutput(0, [CopyResult(job.job_id), CopyResult(job.job_id)])
    stranger = WorkerOutput(1, [CopyResult(JobId(999))])
    assert engine.connector.update_connector_output([twice, stranger]) == []
    assert engine.connector.get_stats()["stray_results"] == 2
    done = WorkerOutput(1, [CopyResult(job.job_id)])
    assert len(engine.connector.update_connector_output([done])) == 1


def test_a_failure_on_an_early_rank_is_remembered_until_the_last_one_reports() -> None:
    engine, _ = loading(2)
    (job,) = engine.messages[-1].loads
    slot = job.copies[0].slots[4]
    connector = engine.connector
    failed = WorkerOutput(0, [CopyResult(job.job_id, frozenset({slot}))])
    assert connector.update_connector_output([failed]) == []
    (outcome,) = connector.update_connector_output([WorkerOutput(1, [CopyResult(job.job_id)])])
    assert outcome.num_computed_tokens == 16


def test_a_result_for_a_request_that_has_ended_is_settled() -> None:
    engine = ToyEngine(ToySettings())
    engine.add("r", range(8), 1)
    engine.step()
    assert "r" in engine.finished
    assert engine.transfers[0].queued
    engine.finish()
    assert engine.manager.get_stats()["stored_chunks"] == 2
    assert engine.manager.get_stats()["num_requests"] == 0
