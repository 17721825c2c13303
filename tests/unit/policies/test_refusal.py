"""What a policy refused to a request does not keep free room from being used."""

import pytest

from kvstrata import OffloadKey, ReqContext, build_manager, make_offload_key
from kvstrata.testing import FakeClock

X, A, C = (make_offload_key(name * 32, 0) for name in (b"x", b"a", b"c"))


@pytest.mark.parametrize("policy", ["guard", "hazard", "hazard-p20"])
def test_free_room_is_used_by_a_request_that_was_refused_something(policy: str) -> None:
    manager = build_manager(
        {"primary": {"num_chunks": 2, "policy": policy}},
        chunk_bytes=16,
        namespace="test",
        clock=FakeClock(),
    )

    def store(keys: list[OffloadKey], ctx: ReqContext) -> list[OffloadKey]:
        output = manager.prepare_store(keys, ctx)
        assert output is not None
        manager.complete_store(output.keys_to_store, ctx)
        return list(output.keys_to_store)

    other = ReqContext("other")
    ctx = ReqContext("ctx", {"kvstrata": {"session": "over"}})
    manager.on_new_request(other)
    manager.on_new_request(ctx)
    assert store([X], other) == [X]
    assert store([A, C], ctx) == [A]
    manager.delete([A], ctx)
    assert store([A], ctx) == [A]
