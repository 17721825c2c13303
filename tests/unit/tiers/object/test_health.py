import pytest

pytest.importorskip("obstore")

from kvstrata.tiers.object.client import FailureKind, ObjectStoreError
from kvstrata.tiers.object.health import Health


def failure(kind: FailureKind) -> ObjectStoreError:
    return ObjectStoreError("bucket", kind)


def test_each_kind_of_failure_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    health = Health()
    for _ in range(3):
        health.failed(failure(FailureKind.THROTTLED), "loading")
    health.failed(failure(FailureKind.TIMEOUT), "storing")
    assert (health.counters["throttled"], health.counters["timeouts"]) == (3, 1)
    assert [record.message.partition(";")[0] for record in caplog.records] == [
        "bucket: throttled, while loading",
        "bucket: timed out, while storing",
    ]


def test_the_state_is_the_last_failure_until_the_store_answers() -> None:
    health = Health()
    assert health.state == "ok"
    health.failed(failure(FailureKind.UNREACHABLE), "loading")
    assert health.state == "unavailable"
    health.failed(failure(FailureKind.OTHER), "loading")
    assert health.state == "other_failures"
    health.answered()
    assert health.state == "ok"
