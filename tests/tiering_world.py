"""A small world for tests of the orchestrator: a tiny primary over tiers that do as they are told.

The engine is played with the calls of `kvstrata.testing.manager_calls`, real bytes included.
"""

from collections.abc import Sequence
from typing import Any

from kvstrata.build import build_manager
from kvstrata.core.delegate import find_manager
from kvstrata.core.keys import OffloadKey
from kvstrata.core.request import ReqContext
from kvstrata.core.results import LoadJob, StoreJob
from kvstrata.core.stats import Stats
from kvstrata.testing import FakeBackend, FakeClock, pattern
from kvstrata.testing.manager_calls import end_step, finish, load, start, store
from kvstrata.testing.tier_calls import NUM_POLLS_MAX, pause
from kvstrata.tiering.manager import TieringOffloadingManager

CHUNK_BYTES = 64
FAKE = "kvstrata.testing:FakeTier"


class World:
    """One manager with named fake tiers, each with its backend.

    `backends["a"]` is what is behind tier "a"; `clock` is everybody's time.
    """

    def __init__(
        self,
        num_slots: int = 4,
        tiers: Sequence[str] = ("a",),
        *,
        tier: dict[str, Any] | None = None,
        each: dict[str, dict[str, Any]] | None = None,
        backends: dict[str, FakeBackend] | None = None,
        **config: Any,  # noqa: ANN401
    ) -> None:
        self.clock = FakeClock()
        self.backends = {name: (backends or {}).get(name) or FakeBackend() for name in tiers}
        settings = []
        for name in tiers:
            settings.append(
                {"type": FAKE, "name": name} | (tier or {}) | (each or {}).get(name, {})
            )
            if ":" in settings[-1]["type"]:
                settings[-1]["backend"] = self.backends[name]
        config = {"primary": {"num_chunks": num_slots, "policy": "lru"}, "tiers": settings} | config
        self.manager = build_manager(
            config, chunk_bytes=CHUNK_BYTES, namespace="world", clock=self.clock
        )
        tiering = find_manager(self.manager, TieringOffloadingManager)
        assert tiering is not None
        self.tiering = tiering

    # What is below

    def put_below(self, name: str, keys: Sequence[OffloadKey]) -> None:
        """Let a tier have chunks from an earlier life."""
        for key in keys:
            self.backends[name].chunks[key] = pattern(key, CHUNK_BYTES)

    def below(self, name: str) -> set[OffloadKey]:
        return set(self.backends[name].chunks)

    def loads(self, name: str = "a") -> list[LoadJob]:
        return [job for job in self.backends[name].jobs if isinstance(job, LoadJob)]

    def stores(self, name: str = "a") -> list[StoreJob]:
        return [job for job in self.backends[name].jobs if isinstance(job, StoreJob)]

    # What the engine does

    def request(self, req_id: str, **hints: Any) -> ReqContext:  # noqa: ANN401
        return start(self.manager, req_id, **hints)

    def run(
        self,
        req_id: str,
        keys: Sequence[OffloadKey],
        **hints: Any,  # noqa: ANN401
    ) -> None:
        """Play a request that computes and stores all of these chunks."""
        ctx = self.request(req_id, **hints)
        assert store(self.manager, keys, ctx) == list(keys)
        finish(self.manager, ctx)

    def lookup(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> int | None:
        return self.manager.lookup(keys, ctx)

    def load(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        load(self.manager, keys, ctx)

    def step(self, new: Sequence[str] = (), preempted: Sequence[str] = (), by_s: float = 0) -> None:
        end_step(self.manager, new, preempted)
        self.clock.advance(by_s)

    def settle(self) -> None:
        """End steps until every copy has ended, also those on a tier's own threads."""
        for _ in range(NUM_POLLS_MAX):
            end_step(self.manager)
            if not self.manager.has_pending_work():
                return
            pause()
        raise AssertionError("a copy never ended")

    def flood(self, num_chunks: int) -> None:
        """Push everything out of the primary that may leave."""
        for i in range(num_chunks):
            ctx = self.request(f"flood {i}", store_tiers=[])
            store(self.manager, [OffloadKey(b"flood %d" % i)], ctx)
            finish(self.manager, ctx)

    # What can be seen

    @property
    def stats(self) -> Stats:
        return self.manager.get_stats()

    def tier(self, name: str = "a") -> Stats:
        return self.stats.tiers[name]

    def assert_idle(self) -> None:
        """Assert that after some steps every slot is free or evictable and nothing is in flight."""
        for _ in range(4):
            self.step()
        self.tiering.check()
        stats = self.stats
        assert not stats.jobs
        assert not self.manager.has_pending_work()
        assert stats["num_requests"] == stats["num_promotions"] == stats["num_writing"] == 0
        assert stats["num_free"] + stats["num_evictable"] == stats["num_slots"]
