"""The p2p tier: pulls chunks from other hosts' memory and serves this host's to them."""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from threading import Lock
from typing import Any, Final, Self, cast

from typing_extensions import override

from kvstrata.core.errors import ConfigError, TierClosedError
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.memory import SlotView
from kvstrata.core.metrics import P2P_METRICS, TIER_METRICS
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.core.results import JobResult, LoadJob, LookupResult, StoreJob
from kvstrata.core.settings import join, parse_settings
from kvstrata.core.stats import JobStats, Stats
from kvstrata.core.tier import DEFAULT_ENV, SecondaryTierManager, TierEnv
from kvstrata.tiers.p2p.directory import Directory, connect_to_redis
from kvstrata.tiers.p2p.fleet import NUM_QUESTIONS_MAX, Fleet
from kvstrata.tiers.p2p.handshake import Credentials, tls_contexts
from kvstrata.tiers.p2p.nixl_plane import NixlPlane
from kvstrata.tiers.p2p.server import PeerServer
from kvstrata.tiers.p2p.serving import Serving
from kvstrata.tiers.p2p.session import Lane
from kvstrata.tiers.p2p.settings import Address, P2pSettings, Payload
from kvstrata.tiers.p2p.shelf import Shelf
from kvstrata.tiers.p2p.transfers import (
    FetchTask,
    Load,
    Loads,
    NixlFetchTask,
    Outcome,
    Piece,
    Question,
)
from kvstrata.tiers.p2p.transport import listen
from kvstrata.tiers.p2p.whereabouts import Whereabouts
from kvstrata.tiers.p2p.wire import KEYS_MAX

PIECE_BYTES_MAX: Final = 32 << 20  # of one Fetch
PIECE_CHUNKS_MAX: Final = 64
DIRECTORY: Final = "\0directory"  # what is asked besides peers; no identity looks like this
COUNTERS: Final = [
    metric.name for metric in (*TIER_METRICS, *P2P_METRICS) if metric.kind == "counter"
]


class P2pTier(SecondaryTierManager):
    """Other hosts' memory, read only: hosts pull, nobody writes into another's.

    Every store fails at once, which `accepts_stores` says beforehand. What the primary puts on
    `shelf` is served to peers while the tier lives.
    """

    accepts_stores = False

    def __init__(self, slots: SlotView, settings: P2pSettings, env: TierEnv = DEFAULT_ENV) -> None:
        """Begin to listen, if that is set; peers are connected to when they are first asked.

        Raises:
            ConfigError: The settings can't stand together, or a file or address can't be used.
        """
        settings.check(env.path)
        self._slots, self._settings, self._env = slots, settings, env
        self._own = _credentials(settings, env, slots.chunk_bytes)
        self._lock = Lock()
        self._counters: Counter[str] = Counter()
        self._to_ask: dict[str | None, list[OffloadKey]] = {}
        self._is_closed = False
        self._loads = Loads()
        self._whereabouts = Whereabouts(
            env.clock, settings.hit_ttl_s, settings.miss_ttl_s, settings.num_answers_max
        )
        self.shelf: Shelf = Shelf(slots, env.clock, settings.shelf_limits)
        self._plane = self._open_plane()
        self._serving = Serving(settings, self.shelf, env.clock, self._plane)
        self._server = self._start_server()
        self._fleet = Fleet(self._own, settings, env.clock, self._whereabouts.forget_peer)
        self._directory = self._open_directory()

    @classmethod
    @override
    def from_config(cls, slots: SlotView, settings: Mapping[str, Any], env: TierEnv) -> Self:
        return cls(slots, parse_settings(P2pSettings, settings, env.path), env)

    def _open_directory(self) -> Directory | None:
        settings, path = self._settings, join(self._env.path, "directory")
        if settings.directory is None:
            return None
        client = connect_to_redis(settings.directory, settings.silence_timeout_s, path)
        directory = Directory(
            client,
            namespace=self._env.namespace,
            identity=settings.identity,
            address=settings.advertise or self.address,
            lease_s=settings.directory_lease_s,
            found=self._learn_from_directory,
        )
        self.shelf.listener = directory
        directory.start(self.shelf.published)
        return directory

    def _open_plane(self) -> NixlPlane | None:
        if self._settings.payload is not Payload.NIXL:
            return None
        name = f"{self._own.identity}-{self._own.generation.hex()[:16]}"
        return NixlPlane(self._slots, name, join(self._env.path, "payload"))

    def _fetch_task(self, piece: Piece) -> FetchTask:
        if self._plane is None:
            return FetchTask(piece, self._slots, self._loads, self._take_tried)
        return NixlFetchTask(piece, self._slots, self._loads, self._take_tried, self._plane)

    def _start_server(self) -> PeerServer | None:
        address = self._settings.listen
        if address is None:
            return None
        try:
            listener = listen(address)
        except OSError as error:
            raise ConfigError(
                join(self._env.path, "listen"), f"can't listen on {address}: {error.strerror}"
            ) from error
        server = PeerServer(listener, self._own, self._settings, self._serving)
        server.start()
        return server

    @property
    def address(self) -> Address | None:
        """Where this host listens, the port settled; None if it only pulls."""
        return None if self._server is None else Address(*self._server.address[:2])

    @override
    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        return self.lookup_many((key,), ctx)[0]

    @override
    def lookup_many(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> Sequence[LookupResult]:
        if not self._directory and not any(session.is_up for session in self._fleet.sessions()):
            return [LookupResult.MISS] * len(keys)
        states = self._whereabouts.states(keys)
        num_unknown = states.count(None)
        if not num_unknown:
            return cast("Sequence[LookupResult]", states)
        to_ask = self._to_ask.setdefault(ctx.hints.peer, [])
        if num_unknown == len(keys):
            to_ask.extend(keys)
            return [LookupResult.RETRY] * num_unknown
        to_ask.extend(key for key, state in zip(keys, states, strict=True) if state is None)
        return [state or LookupResult.RETRY for state in states]

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._fleet.tend()
        to_ask, self._to_ask = self._to_ask, {}
        for hint, keys in to_ask.items():
            self._ask(list(dict.fromkeys(keys)), hint)

    def _ask(self, keys: Sequence[OffloadKey], hint: str | None) -> None:
        """Ask the hinted peer and, about what it has not, the others; all of them without one."""
        ready = [name for name in self._fleet.static if self._is_ready(name)]
        if self._directory and self._directory.num_waiting < NUM_QUESTIONS_MAX:
            ready.append(DIRECTORY)
        first = [hint] if hint is not None and self._is_ready(hint) else ready
        later = [name for name in ready if name not in first]
        epoch = self._whereabouts.expect(keys, first, later)
        self._put_questions(first, keys, epoch)

    def _is_ready(self, name: str) -> bool:
        num_waiting = self._fleet.num_waiting(name, Lane.CONTROL)
        return self._fleet.is_up(name) and num_waiting < NUM_QUESTIONS_MAX

    def _put_questions(self, peers: Sequence[str], keys: Sequence[OffloadKey], epoch: int) -> None:
        for peer in peers:
            for start in range(0, len(keys), KEYS_MAX):
                part = keys[start : start + KEYS_MAX]
                self._count("lookup_requests")
                if peer == DIRECTORY and self._directory:
                    self._directory.ask(part, epoch)
                else:
                    self._fleet.submit(peer, Question(peer, part, epoch, self._learn))

    def _learn(
        self, peer: str, keys: Sequence[OffloadKey], states: Sequence[int] | None, epoch: int
    ) -> None:
        further = self._whereabouts.learn(peer, keys, states, epoch)
        for peers, rest in further.items():
            self._put_questions(peers, rest, epoch)

    def _learn_from_directory(
        self,
        keys: Sequence[OffloadKey],
        found: "list[list[tuple[str, Address]]] | None",
        epoch: int,
    ) -> None:
        for identity, address in {pair for each in found or () for pair in each}:
            self._fleet.meet(identity, address)
        holders = [[name for name, _ in each] for each in found or [[]] * len(keys)]
        further = self._whereabouts.learn_holders(DIRECTORY, keys, holders, epoch)
        for peers, rest in further.items():
            self._put_questions(peers, rest, epoch)

    @override
    def submit_store(self, job: StoreJob) -> None:
        self._check_open()
        self._count("refused_store_chunks", len(job.keys))
        self._count("failed_store_chunks", len(job.keys))
        self._loads.finish(JobResult(job.job_id, frozenset(job.keys)))

    @override
    def submit_load(self, job: LoadJob) -> None:
        self._check_open()
        hint = None if job.req_context is None else job.req_context.hints.peer
        load = self._loads.start(job, self._settings.transfer_timeout_s, self._env.clock.now_s())
        start = 0
        for names, group in groupby(self._whereabouts.holders(job.keys)):
            end = start + len(list(group))
            keys, slots = job.keys[start:end], job.slots[start:end]
            self._dispatch(load, keys, slots, self._candidates(names, hint))
            start = end

    def _candidates(self, holders: Sequence[str] | None, hint: str | None) -> tuple[str, ...]:
        """Return the peers to try, in order: who is known to have it, or all if nobody was asked.

        The hinted one comes first, then who has least to do.
        """
        if holders is None:
            holders = [*self._fleet.static, *([hint] if hint else [])]
        waiting = {name: self._fleet.num_waiting(name, Lane.PAYLOAD) for name in holders}
        return tuple(sorted(waiting, key=lambda name: (name != hint, waiting[name])))

    def _dispatch(
        self,
        load: Load,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
        candidates: tuple[str, ...],
    ) -> None:
        """Send chunks to their first living candidate, in pieces; fail them if there is none."""
        living = [name for name in candidates if self._fleet.is_up(name)]
        if not living or load.is_over:
            self._settle(load, dict.fromkeys(keys, Outcome.LOST), {})
            return
        peer, others = living[0], tuple(living[1:])
        num = self._piece_chunks(len(keys))
        for start in range(0, len(keys), num):
            end = start + num
            piece = Piece(load, peer, keys[start:end], slots[start:end], others)
            self._fleet.submit(peer, self._fetch_task(piece))

    def _piece_chunks(self, num_chunks: int) -> int:
        """Return how many of a peer's chunks one request asks for, to use all connections."""
        share = -(-num_chunks // self._settings.num_connections)
        fitting = max(1, PIECE_BYTES_MAX // self._slots.chunk_bytes)
        return max(1, min(share, fitting, PIECE_CHUNKS_MAX))

    def _take_tried(
        self,
        piece: Piece,
        outcomes: Mapping[OffloadKey, Outcome],
        expires_at_s: Mapping[OffloadKey, float],
    ) -> None:
        """Settle what came; try the rest at the next candidate."""
        for key, outcome in outcomes.items():
            if outcome is Outcome.ABSENT:
                self._whereabouts.correct(piece.peer, key)
        self._count("corrupt_chunks", list(outcomes.values()).count(Outcome.CORRUPT))
        again = {
            key: slot
            for key, slot in zip(piece.keys, piece.slots, strict=True)
            if piece.others and outcomes[key] is not Outcome.LOADED
        }
        settled = {key: outcome for key, outcome in outcomes.items() if key not in again}
        self._settle(piece.load, settled, expires_at_s)
        if again:
            self._dispatch(piece.load, list(again), list(again.values()), piece.others)

    def _settle(
        self,
        load: Load,
        outcomes: Mapping[OffloadKey, Outcome],
        expires_at_s: Mapping[OffloadKey, float],
    ) -> None:
        if not outcomes:
            return
        num_loaded = list(outcomes.values()).count(Outcome.LOADED)
        self._count("loaded_chunks", num_loaded)
        self._count("loaded_bytes", num_loaded * self._slots.chunk_bytes)
        self._count("failed_load_chunks", len(outcomes) - num_loaded)
        self._loads.settle(load, outcomes, expires_at_s)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        return self._loads.take_finished()

    @override
    def cancel(self, job_id: JobId) -> None:
        self._loads.cancel([job_id])

    @override
    def drain_jobs(self, timeout_s: float) -> Collection[JobId]:
        return self._loads.wait(timeout_s)

    @override
    def reset(self) -> None:
        """Forget what peers said; their chunks are theirs and stay."""
        self._to_ask.clear()
        self._whereabouts.clear()
        self._loads.cancel()

    @override
    def shutdown(self, timeout_s: float = 10.0) -> Collection[JobId]:
        if self._is_closed:
            return ()
        self._is_closed = True
        end_s = time.monotonic() + timeout_s
        self._loads.cancel()
        if self._directory is not None:
            self._directory.close(max(0.0, end_s - time.monotonic()))
        self._fleet.close(max(0.0, end_s - time.monotonic()))
        if self._server is not None:
            self._server.stop(max(0.0, end_s - time.monotonic()))
        stuck = self._loads.wait(max(0.0, end_s - time.monotonic()))
        if self._plane is not None and not stuck:
            self._plane.close()
        return stuck

    def _check_open(self) -> None:
        if self._is_closed:
            raise TierClosedError(self._env.name, "was shut down")

    def _count(self, name: str, num: int = 1) -> None:
        with self._lock:
            self._counters[name] += num

    @override
    def get_stats(self) -> Stats:
        now_s = self._env.clock.now_s()
        jobs = [
            JobStats(
                load.job.job_id,
                "load",
                self._env.name,
                len(load.job.keys),
                now_s - load.started_s,
                None if load.job.req_context is None else load.job.req_context.req_id,
            )
            for load in self._loads.in_flight()
        ]
        with self._lock:
            counters = dict.fromkeys(COUNTERS, 0) | self._counters | self._serving.counters()
        counters["lost_peers"] = self._fleet.num_lost
        sessions = self._fleet.sessions()
        gauges = {
            "num_resident": 0,  # what can be pulled is the peers'
            "used_bytes": 0,
            "num_jobs": len(jobs),
            "num_peers": len(sessions),
            "num_peers_up": sum(session.is_up for session in sessions),
            "num_connections": 0 if self._server is None else self._server.num_connections,
            "num_answers": len(self._whereabouts),
            "num_answers_max": self._settings.num_answers_max,
            "num_published": self.shelf.num_published,
            "num_leased": self.shelf.num_leased,
            "num_parked": self.shelf.num_parked,
            "num_parked_max": self._settings.num_parked_max,
        }
        return Stats(gauges, counters, jobs=jobs, state="closed" if self._is_closed else "ok")


def _credentials(settings: P2pSettings, env: TierEnv, chunk_bytes: int) -> Credentials:
    calling = called = None
    if settings.tls is not None:
        calling, called = tls_contexts(settings.tls, env.path)
    secret = settings.read_secret(env.path)
    return Credentials(settings.identity, env.namespace, chunk_bytes, secret, calling, called)
