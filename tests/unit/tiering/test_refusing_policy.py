"""A policy that refuses chunks does not keep a request from what a tier holds for it."""

import pytest

from kvstrata import ReqContext, ScheduleEndContext, build_manager, make_offload_key
from kvstrata.testing import FakeBackend, FakeClock

CHUNK_BYTES = 16


@pytest.mark.parametrize("policy", ["lru", "arc", "guard", "hazard"])
def test_what_a_request_is_about_to_read_finds_room_in_a_full_primary(policy: str) -> None:
    keys = [make_offload_key(bytes([i]) * 32, 0) for i in range(8)]
    backend = FakeBackend(chunks={key: bytes(CHUNK_BYTES) for key in keys[4:]})
    manager = build_manager(
        {
            "primary": {"num_chunks": 4, "policy": policy},
            "tiers": [{"type": "kvstrata.testing:FakeTier", "backend": backend, "write": "never"}],
        },
        chunk_bytes=CHUNK_BYTES,
        namespace="test",
        clock=FakeClock(),
    )
    first = ReqContext("first")
    manager.on_new_request(first)
    output = manager.prepare_store(keys[:4], first)
    assert output is not None
    manager.complete_store(output.keys_to_store, first)
    manager.on_request_finished(first)
    manager.on_schedule_end(ScheduleEndContext(["first"], []))

    second = ReqContext("second")
    manager.on_new_request(second)
    assert manager.lookup(keys[4:], second) is None
    manager.on_schedule_end(ScheduleEndContext(["second"], []))
    assert manager.lookup(keys[4:], second) == 4
