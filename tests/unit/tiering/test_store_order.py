from kvstrata.build import build_manager
from kvstrata.core.keys import OffloadKey, make_offload_key
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.testing import FakeBackend, FakeClock


def make_keys(count: int) -> list[OffloadKey]:
    return [make_offload_key(bytes([i]) * 32, 0) for i in range(count)]


def test_a_prompt_that_passes_through_the_primary_is_stored_in_the_order_of_the_offer() -> None:
    keys = make_keys(6)
    backend = FakeBackend(chunks={key: bytes(16) for key in keys[:3]})
    manager = build_manager(
        {
            "primary": {"num_chunks": 4, "policy": "lru"},
            "tiers": [{"type": "kvstrata.testing:FakeTier", "backend": backend}],
        },
        chunk_bytes=16,
        namespace="test",
        clock=FakeClock(),
    )
    ctx = ReqContext("r")
    manager.on_new_request(ctx)
    assert manager.lookup(keys, ctx) is None
    manager.on_schedule_end(ScheduleEndContext(["r"], []))
    assert manager.lookup(keys, ctx) == 3
    manager.prepare_load(keys[:3], ctx)
    manager.complete_load(keys[:3], ctx)
    output = manager.prepare_store(keys, ctx)
    assert output is not None
    # What gives way because it is in the tier is not stored again in the same answer.
    num_stored = len(output.keys_to_store)
    assert num_stored > 0
    assert output.keys_to_store == keys[3 : 3 + num_stored]
    assert len(set(output.store_spec.slots)) == num_stored
    manager.shutdown()
