"""Tenants never share a chunk, whatever a client sends, and no tenant takes more than its quota."""

import hashlib
import hmac
from typing import Any

import pytest

from kvstrata.build import build_manager
from kvstrata.core.errors import ConfigError
from kvstrata.core.manager import OffloadingManager
from kvstrata.core.request import ReqContext
from kvstrata.testing import FakeClock, chain
from kvstrata.testing.manager_base import assert_idle
from kvstrata.testing.manager_calls import finish, load, look_up, start, store

ABC = chain("abc")


def build(num_chunks: int = 8, **settings: object) -> OffloadingManager:
    return build_manager(
        {"primary": {"num_chunks": num_chunks, "policy": "lru"}, **settings},
        chunk_bytes=100,
        namespace="test",
        clock=FakeClock(),
    )


def begin(manager: OffloadingManager, req_id: str, params: dict[str, Any]) -> ReqContext:
    ctx = ReqContext(req_id, params)
    manager.on_new_request(ctx)
    return ctx


def test_equal_keys_of_different_tenants_are_different_chunks() -> None:
    # Field report O01: the same tenant hits, so the test is live.
    manager = build(num_chunks=16)
    a, b, nobody = (
        start(manager, "a", tenant="A"),
        start(manager, "b", tenant="B"),
        start(manager, "-"),
    )
    assert store(manager, ABC, a) == ABC
    assert [look_up(manager, ABC, ctx) for ctx in (a, b, nobody)] == [3, 0, 0]
    assert store(manager, ABC, b) == ABC
    assert store(manager, ABC, nobody) == ABC
    assert manager.get_stats()["num_resident"] == 9
    load(manager, ABC, a)
    again = start(manager, "again", tenant="A")
    assert look_up(manager, ABC, again) == 3
    manager.delete(ABC, b)
    assert [look_up(manager, ABC, ctx) for ctx in (a, b, nobody)] == [3, 0, 3]
    for ctx in (a, b, nobody, again):
        finish(manager, ctx)
    assert_idle(manager)


def test_failures_are_settled_under_the_tenants_own_keys() -> None:
    manager = build()
    ctx = start(manager, "a", tenant="A")
    store(manager, ABC, ctx, failed=[ABC[1]])
    assert look_up(manager, ABC, ctx) == 1
    manager.prepare_load([ABC[0]], ctx)
    manager.complete_load([ABC[0]], ctx, failed=[ABC[0]])
    assert manager.get_stats()["failed_load_chunks"] == 1
    assert manager.get_stats()["failed_store_chunks"] == 1


def test_a_fixed_tenant_cannot_be_chosen_by_the_client() -> None:
    # Field report O01.
    manager = build(tenant_from="fixed:ours")
    a, b = start(manager, "a", tenant="A"), start(manager, "b", tenant="B")
    store(manager, ABC, a)
    assert look_up(manager, ABC, b) == 3


def test_a_parameter_of_the_gateway_decides_and_the_hint_does_not() -> None:
    # Field report O01.
    manager = build(tenant_from="param:x-tenant")
    a = begin(manager, "a", {"x-tenant": "A"})
    b = begin(manager, "b", {"x-tenant": "B", "kvstrata": {"tenant": "A"}})
    again = begin(manager, "again", {"x-tenant": "A", "kvstrata": {"tenant": "B"}})
    store(manager, ABC, a)
    assert [look_up(manager, ABC, ctx) for ctx in (b, again)] == [0, 3]


def test_a_signed_tenant_is_believed_only_with_its_signature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Field report O01.
    monkeypatch.setenv("TENANT_SECRET", "s3cret")
    manager = build(num_chunks=16, tenant_from="signed:TENANT_SECRET")
    signature = hmac.new(b"s3cret", b"A", hashlib.sha256).hexdigest()
    true = start(manager, "true", tenant=f"A:{signature}")
    store(manager, ABC, true)
    assert look_up(manager, ABC, start(manager, "again", tenant=f"A:{signature.upper()}")) == 3
    for i, claim in enumerate(
        ["A", "A:", f"B:{signature}", f"A:{signature[:-1]}0", f":{signature}"]
    ):
        assert look_up(manager, ABC, start(manager, f"false {i}", tenant=claim)) == 0
    forged = start(manager, "forged", tenant="A:00")
    store(manager, ABC, forged)
    assert look_up(manager, ABC, start(manager, "plain")) == 0


def test_a_missing_secret_is_an_error_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENANT_SECRET", raising=False)
    with pytest.raises(ConfigError, match=r"^tenant_from: .*TENANT_SECRET"):
        build(tenant_from="signed:TENANT_SECRET")


def test_a_tenant_stays_within_its_quota() -> None:
    manager = build(tenants={"small": {"quota": "25%"}})
    small, big = start(manager, "small", tenant="small"), start(manager, "big", tenant="big")
    assert len(store(manager, chain("abcd"), small)) == 2
    assert len(store(manager, chain("uvwxyz"), big)) == 6
    finish(manager, small)
    other = start(manager, "other", tenant="small")
    assert len(store(manager, chain("mn"), other)) == 2
    assert look_up(manager, chain("uvwxyz"), big) == 6


def test_a_tenants_lifetime_bounds_its_chunks() -> None:
    clock = FakeClock()
    manager = build_manager(
        {"primary": {"num_chunks": 8, "policy": "lru"}, "tenants": {"t": {"ttl_s": 60}}},
        chunk_bytes=100,
        namespace="test",
        clock=clock,
    )
    short = start(manager, "short", tenant="t", ttl_s=10)
    store(manager, chain("a"), short)
    long = start(manager, "long", tenant="t", ttl_s=1_000)
    store(manager, chain("b"), long)
    clock.advance(11.0)
    assert [look_up(manager, chain(letter), long) for letter in "ab"] == [0, 1]
    clock.advance(50.0)
    assert look_up(manager, chain("b"), long) == 0
