"""What is present: answers from memory, and probes that read the start of an object."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvstrata.core.errors import CorruptChunkError
from kvstrata.core.events import EventKind, RemovalReason
from kvstrata.core.keys import OffloadKey
from kvstrata.core.request import ReqContext
from kvstrata.core.results import LookupResult
from kvstrata.tiers.chunk_format import HEADER_BYTES, Buffer, ChunkHeader, decode_header
from kvstrata.tiers.object.board import Board
from kvstrata.tiers.object.client import RETRIED, FailureKind, ObjectStoreError
from kvstrata.tiers.object.removal import Removals
from kvstrata.tiers.object.workers import Lane


@dataclass(slots=True, eq=False)
class _Probe:
    key: OffloadKey
    path: str
    asked_s: float
    num_tries: int = 0


class Lookups:
    """Answers to lookups. Only presence is remembered; an absence is told in one step, forgotten.

    A chunk counts as present once its header was read, or written, here: it has the right size, key
    and namespace and has not expired.
    """

    def __init__(self, board: Board, removals: Removals) -> None:
        self._board = board
        self._removals = removals
        self._asked: list[_Probe] = []  # to be probed at the end of the step
        self._probing: dict[str, _Probe] = {}
        self._absent: dict[str, bool] = {}  # False: not told yet

    def look_up(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> list[LookupResult]:
        """Answer from memory; ask for the rest. The caller holds the lock."""
        patience_s = self._board.settings.lookup_timeout_s
        if ctx.hints.max_wait_s is not None:
            patience_s = min(patience_s, ctx.hints.max_wait_s)
        now_s, wall_s = self._board.env.clock.now_s(), self._board.env.clock.wall_s()
        return [self._look_up(key, now_s, wall_s, patience_s) for key in keys]

    def _look_up(
        self, key: OffloadKey, now_s: float, wall_s: float, patience_s: float
    ) -> LookupResult:
        board = self._board
        path = board.path_of(key)
        is_leaving = board.is_leaving(path)
        entry = board.index.get(path)
        if entry is not None and entry.is_verified and not is_leaving:
            if entry.expires_at_s > wall_s:
                return LookupResult.HIT
            self._removals.remove([path], RemovalReason.EXPIRED)
        elif path in board.storing:
            return LookupResult.HIT_PENDING
        elif path in self._absent:
            self._absent[path] = True
        elif not is_leaving:
            return self._wait(key, path, now_s, patience_s)
        return LookupResult.MISS

    def _wait(self, key: OffloadKey, path: str, now_s: float, patience_s: float) -> LookupResult:
        """Have the key probed, unless that takes too long or there are too many."""
        board = self._board
        probe = self._probing.get(path)
        if probe is None:
            if len(self._probing) >= board.settings.num_lookups_max:
                board.counters["dropped_lookups"] += 1
                return LookupResult.MISS
            self._probing[path] = _Probe(key, path, now_s)
            self._asked.append(self._probing[path])
        elif now_s - probe.asked_s >= patience_s:
            board.counters["lookup_timeouts"] += 1
            del self._probing[path]  # whoever asks next asks the store anew
            return LookupResult.MISS
        return LookupResult.RETRY

    def end_step(self) -> None:
        """Forget the absences that were told, and start the step's probes. Holds the lock."""
        most = self._board.settings.num_lookups_max
        untold = [path for path, is_told in self._absent.items() if not is_told]
        self._absent = dict.fromkeys(untold[-most:], False)
        asked, self._asked = self._asked, []
        for probe in asked:
            self._board.pool.submit(Lane.PROBE, partial(self._probe, probe))

    def num_waiting(self) -> int:
        """Return how many keys have no answer yet."""
        return len(self._probing)

    def _probe(self, probe: _Probe) -> None:
        """Read the start of an object, on a worker."""
        board = self._board
        with board.lock:
            if self._probing.get(probe.path) is not probe:
                return  # nobody waits for it any more
            probe.num_tries += 1
            board.counters["probes"] += 1
        try:
            start = board.client.read_start(probe.path, HEADER_BYTES, board.object_bytes)
            header = self._check(start, probe.key)
        except ObjectStoreError as error:
            self._failed(probe, error)
        except CorruptChunkError:
            self._damaged(probe)
        else:
            self._found(probe, header)

    def _check(self, start: Buffer, key: OffloadKey) -> ChunkHeader:
        board = self._board
        header = decode_header(start, board.env.name)
        is_right = (header.key, header.namespace_digest, header.payload_bytes) == (
            key,
            board.digest,
            board.slots.chunk_bytes,
        )
        if not is_right:
            raise CorruptChunkError(board.env.name, f"the object of {key.hex()} holds another")
        return header

    def _found(self, probe: _Probe, header: ChunkHeader) -> None:
        board = self._board
        with board.lock:
            board.health.answered()
            self._end(probe)
            if header.expires_at_s <= board.env.clock.wall_s():
                board.counters["probe_misses"] += 1
                self._removals.remove([probe.path], RemovalReason.EXPIRED)
                return
            board.counters["probe_hits"] += 1
            board.note(probe.path, header.expires_at_s)

    def _damaged(self, probe: _Probe) -> None:
        with self._board.lock:
            self._end(probe)
            self._board.counters["probe_misses"] += 1
            self._removals.remove([probe.path], RemovalReason.CORRUPT)

    def _failed(self, probe: _Probe, error: ObjectStoreError) -> None:
        board = self._board
        if error.kind is FailureKind.WRONG_SIZE:
            self._damaged(probe)
            return
        if error.kind is FailureKind.NOT_FOUND:
            with board.lock:
                board.health.answered()
                board.counters["probe_misses"] += 1
                if board.forget(probe.path):
                    board.say(EventKind.REMOVED, [probe.path], RemovalReason.EXTERNAL)
                self._end(probe, is_absent=True)
            return
        board.failed(error, "looking up")
        with board.lock:
            if error.kind in RETRIED and probe.num_tries < board.settings.num_tries:
                board.counters["retries"] += 1
                delay_s = board.backoff_s(probe.num_tries)
                board.pool.submit(Lane.PROBE, partial(self._probe, probe), delay_s)
                return
            board.counters["probe_unknown"] += 1
            self._end(probe, is_absent=True)

    def _end(self, probe: _Probe, *, is_absent: bool = False) -> None:
        if self._probing.get(probe.path) is probe:
            del self._probing[probe.path]
            if is_absent:
                self._absent[probe.path] = False
