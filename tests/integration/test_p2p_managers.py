"""Two hosts with real managers: what one stores the other loads, from whichever tier it is in."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvstrata import build_manager
from kvstrata.core.keys import OffloadKey
from kvstrata.core.request import ReqContext
from kvstrata.core.results import LookupResult
from kvstrata.testing import FakeClock, chain, pattern
from kvstrata.testing.tier_calls import IDLE_STEP
from tests.p2p_hosts import PATIENCE_S, eventually

if TYPE_CHECKING:
    from kvstrata.core.manager import OffloadingManager

CHUNK_BYTES = 5_000
NUM_CHUNKS = 6
MEMORY_TIER = {"type": "memory", "max_chunks": 100}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Pair:
    """The managers of two hosts that serve each other, stepped in turn."""

    def __init__(self, *tiers_of_owner: dict[str, Any], clock: FakeClock | None = None) -> None:
        self._clock = clock
        ports = {"owner": free_port(), "reader": free_port()}
        self.managers: dict[str, OffloadingManager] = {}
        for name, other in (("owner", "reader"), ("reader", "owner")):
            p2p = {
                "type": "p2p",
                "identity": name,
                "listen": f"127.0.0.1:{ports[name]}",
                "peers": {other: f"127.0.0.1:{ports[other]}"},
                "connect_timeout_s": 10,
                "silence_timeout_s": 10,
                "backoff_min_s": 0.01,
                "backoff_max_s": 0.02,
                "hit_ttl_s": 0.05,
                "miss_ttl_s": 0.02,
            }
            tiers = [*(tiers_of_owner if name == "owner" else ()), p2p]
            self.managers[name] = build_manager(
                {
                    "primary": {"num_chunks": NUM_CHUNKS, "policy": "lru"},
                    "tiers": tiers,
                    "max_wait_s": PATIENCE_S,
                },
                chunk_bytes=CHUNK_BYTES,
                namespace="model",
                clock=clock,
            )
        self.owner, self.reader = self.managers["owner"], self.managers["reader"]

    def step(self) -> None:
        for manager in self.managers.values():
            manager.on_schedule_end(IDLE_STEP)
        if self._clock is not None:
            self._clock.advance(0.01)

    def store(self, keys: Sequence[OffloadKey], **hints: object) -> int:
        """Have the owner store these chunks; return how many it took."""
        ctx = ReqContext(f"store {keys[-1].hex()}", {"kvstrata": hints})
        self.owner.on_new_request(ctx)
        output = self.owner.prepare_store(keys, ctx)
        assert output is not None
        for key, slot in zip(output.keys_to_store, output.store_spec.slots, strict=True):
            self.owner.slots[slot][:] = pattern(key, CHUNK_BYTES)
        self.owner.complete_store(output.keys_to_store, ctx)
        self.owner.on_request_finished(ctx)
        self.step()
        return len(output.keys_to_store)

    def load(self, keys: Sequence[OffloadKey], **hints: object) -> int:
        """Have the reader load as long a prefix as it can; check every byte; return its length."""
        ctx = ReqContext(f"load {keys[-1].hex()}", {"kvstrata": hints})
        self.reader.on_new_request(ctx)
        counts: list[int | None] = []

        def is_decided() -> bool:
            counts.append(self.reader.lookup(keys, ctx))
            self.step()
            return counts[-1] is not None

        eventually(is_decided, "the lookup")
        count = counts[-1]
        assert count is not None
        spec = self.reader.prepare_load(keys[:count], ctx)
        for key, slot in zip(keys, spec.slots, strict=False):
            assert self.reader.slots[slot] == pattern(key, CHUNK_BYTES)
        self.reader.complete_load(keys[:count], ctx)
        self.reader.on_request_finished(ctx)
        return count

    def has_everything_back(self) -> bool:
        """Say whether nobody reads, or is to read, chunks of the owner."""
        stats = p2p_tier(self.owner).get_stats()
        return not stats["num_leased"] + stats["num_parked"]


@contextmanager
def pair(*tiers_of_owner: dict[str, Any], clock: FakeClock | None = None) -> Iterator[Pair]:
    hosts = Pair(*tiers_of_owner, clock=clock)
    try:
        yield hosts
    finally:
        for manager in hosts.managers.values():
            assert not manager.shutdown(PATIENCE_S).stuck_jobs


def test_what_one_host_stored_the_other_loads() -> None:
    with pair() as hosts:
        hosts.store(chain("abc"))
        assert hosts.load(chain("abcd")) == 3
        stats = hosts.owner.get_stats().tiers["p2p"]
        assert stats["served_chunks"] == 3
        assert stats["num_published"] == 3


def test_stores_are_not_offered_to_a_tier_that_takes_none() -> None:
    with pair() as hosts:
        hosts.store(chain("abc"))
        for _ in range(5):
            hosts.step()
        stats = hosts.owner.get_stats().tiers["p2p"]
        assert stats["refused_store_chunks"] == 0
        assert stats["errors"] == 0
        assert stats.state == "ok"


def test_an_evicted_chunk_is_served_no_more() -> None:
    with pair() as hosts:
        hosts.store(chain("abc"))
        assert hosts.load(chain("abc")[:1]) == 1
        hosts.store(chain("uvwxyz"))  # takes all the room there is
        assert hosts.load(chain("abc")[1:]) == 0
        assert hosts.load(chain("uvwxyz")[:2]) == 2
        assert hosts.owner.get_stats().tiers["p2p"]["num_published"] == NUM_CHUNKS


def test_an_evicted_chunk_is_withdrawn_before_its_slot_is_written() -> None:
    with pair() as hosts:
        hosts.store(chain("abc"))
        shelf = p2p_tier(hosts.owner).shelf
        ctx = ReqContext("greedy")
        hosts.owner.on_new_request(ctx)
        assert hosts.owner.prepare_store(chain("uvwxyz"), ctx) is not None
        assert shelf.present([*chain("abc"), *chain("uvwxyz")]) == [False] * 9
        hosts.owner.complete_store(chain("uvwxyz"), ctx, failed=chain("uvw"))
        assert shelf.present(chain("uvwxyz")) == [False] * 3 + [True] * 3
        hosts.owner.on_request_finished(ctx)


def test_a_deleted_chunk_is_withdrawn() -> None:
    with pair() as hosts:
        hosts.store(chain("abc"))
        ctx = ReqContext("delete")
        hosts.owner.delete(chain("abc")[1:], ctx)
        assert p2p_tier(hosts.owner).shelf.present(chain("abc")) == [True, False, False]
        assert hosts.load(chain("abc")) == 1


def test_a_chunk_that_only_a_local_tier_has_is_offered_through_its_host_only() -> None:
    with pair(MEMORY_TIER) as hosts:
        hosts.store(chain("abc"))
        eventually(lambda: step_until_idle(hosts), "the copies down")
        hosts.store(chain("uvwxyz"))
        eventually(lambda: step_until_idle(hosts), "the copies down")
        ctx = ReqContext("look")
        hosts.owner.on_new_request(ctx)
        states = hosts.owner.lookup_states(chain("abc"), ctx)
        assert set(states) == {LookupResult.HIT_PENDING}  # below the primary
        hosts.owner.on_request_finished(ctx)
        assert hosts.load(chain("abc")) == 3
        assert hosts.reader.get_stats().tiers["p2p"]["loaded_chunks"] == 3


def step_until_idle(hosts: Pair) -> bool:
    hosts.step()
    return not hosts.owner.has_pending_work()


def test_a_chunk_that_nobody_has_does_not_keep_a_request_waiting() -> None:
    with pair(MEMORY_TIER) as hosts:
        assert hosts.load(chain("nobody")) == 0


def test_a_chunk_expires_at_the_host_that_pulled_it_too() -> None:
    clock = FakeClock()
    with pair(clock=clock) as hosts:
        hosts.store(chain("abc"), ttl_s=60.0)
        assert hosts.load(chain("abc")) == 3
        clock.advance(30.0)
        assert hosts.load(chain("abc")) == 3
        clock.advance(31.0)
        assert hosts.load(chain("abc")) == 0
        assert hosts.reader.get_stats()["num_resident"] == 0


def test_a_reset_withdraws_everything_from_peers() -> None:
    with pair() as hosts:
        hosts.store(chain("abc"))
        hosts.owner.reset_cache()
        assert hosts.load(chain("abc")) == 0
        hosts.store(chain("abc"))
        eventually(lambda: hosts.load(chain("abc")) == 3, "the end of the miss that is remembered")


def test_a_chunk_that_a_peer_reads_is_held_until_it_is_read() -> None:
    with pair() as hosts:
        hosts.store(chain("ab"))
        shelf = p2p_tier(hosts.owner).shelf
        lease = shelf.lease(chain("ab"), "reader", 60.0)
        hosts.step()
        ctx = ReqContext("greedy")
        hosts.owner.on_new_request(ctx)
        output = hosts.owner.prepare_store(chain("uvwxyz"), ctx)
        assert output is not None
        assert len(output.keys_to_store) == NUM_CHUNKS - 2
        assert all(shelf.holds(copy) for copy in lease.copies.values())
        hosts.owner.complete_store(output.keys_to_store, ctx)
        shelf.release(lease)
        hosts.step()
        hosts.owner.on_request_finished(ctx)
        hosts.store(chain("123456"))
        assert not any(shelf.holds(copy) for copy in lease.copies.values())


def test_chunks_parked_for_a_host_stay_until_it_has_fetched_them() -> None:
    with pair() as hosts:
        hosts.store(chain("a"))
        assert hosts.store(chain("abc"), park_for="reader") == 2  # the first is there already
        assert hosts.store(chain("uvwxyz")) == NUM_CHUNKS - 3
        assert hosts.load(chain("abc"), peer="owner") == 3
        eventually(hosts.has_everything_back, "the last one")
        hosts.step()
        assert hosts.store(chain("123456")) == NUM_CHUNKS
        eventually(lambda: hosts.load(chain("abc")) == 3, "from its own primary")


def p2p_tier(manager: Any) -> Any:  # noqa: ANN401
    """Find the tier inside its managers."""
    while not hasattr(manager, "_handles"):
        manager = manager.inner
    return next(handle.tier for handle in manager._handles if handle.name == "p2p")


def test_the_slots_of_a_closed_host_are_read_by_nobody() -> None:
    with pair() as hosts:
        hosts.store(chain("abc"))
        assert hosts.load(chain("a")) == 1
        hosts.owner.shutdown(PATIENCE_S)
        assert hosts.load(chain("abc")[1:]) == 0
