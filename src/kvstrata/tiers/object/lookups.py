"""What is present: answers from memory, and probes that read the start of an object."""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

from kvstrata.core.errors import CorruptChunkError
from kvstrata.core.events import EventKind, RemovalReason
from kvstrata.core.keys import OffloadKey
from kvstrata.core.request import ReqContext
from kvstrata.core.results import LookupResult
from kvstrata.tiers.chunk_format import HEADER_BYTES, Buffer, ChunkHeader, decode_header
from kvstrata.tiers.object.board import Board
from kvstrata.tiers.object.client import RETRIED, FailureKind, ObjectStoreError
from kvstrata.tiers.object.index import ObjectName
from kvstrata.tiers.object.removal import Removals
from kvstrata.tiers.object.workers import Lane


class _Ask:
    """Keys of one lookup whose presence is being found out."""

    __slots__ = ("asked_s",)

    def __init__(self, asked_s: float) -> None:
        self.asked_s = asked_s


class _Probe(NamedTuple):
    name: ObjectName
    ask: _Ask
    num_tries: int = 1


class Lookups:
    """Answers to lookups. Only presence is remembered; an absence is told in one step, forgotten.

    A chunk counts as present once its header was read, or written, here: it has the right size, key
    and namespace and has not expired.
    """

    def __init__(self, board: Board, removals: Removals) -> None:
        self._board = board
        self._removals = removals
        self._asked: list[ObjectName] = []  # to be probed from the end of the step on
        self._queue: deque[ObjectName] = deque()  # to be probed now
        self._num_pulling = 0  # tasks that take from the queue
        self._probing: dict[ObjectName, _Ask] = {}  # all that have no answer
        self._absent: dict[ObjectName, bool] = {}  # False: not told yet

    def look_up(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> list[LookupResult]:
        """Answer from memory; ask for the rest. The caller holds the lock."""
        board = self._board
        patience_s = board.settings.lookup_timeout_s
        if ctx.hints.max_wait_s is not None:
            patience_s = min(patience_s, ctx.hints.max_wait_s)
        ask = _Ask(board.env.clock.now_s())
        since_s, wall_s = ask.asked_s - patience_s, board.env.clock.wall_s()
        get, probing = board.index.get, self._probing.get
        names = board.names_of(keys)
        # Nearly all keys are known, or were asked for in this step or an earlier one.
        answers = [
            LookupResult.HIT
            if (entry := get(name)) is not None and entry.expires_at_s > wall_s
            else LookupResult.RETRY
            if (earlier := probing(name)) is not None and earlier.asked_s > since_s
            else None
            for name in names
        ]
        unknown = [name for name, answer in zip(names, answers, strict=True) if answer is None]
        if not unknown:
            return cast("list[LookupResult]", answers)
        if self._are_new(unknown):
            self._ask(dict.fromkeys(unknown, ask))
            return [answer or LookupResult.RETRY for answer in answers]
        return [
            answer or self._look_closer(name, ask)
            for name, answer in zip(names, answers, strict=True)
        ]

    def _are_new(self, unknown: Sequence[ObjectName]) -> bool:
        """Say whether nothing is known of any of these, so that all are to be asked for."""
        board = self._board
        num_free = board.settings.num_lookups_max - len(self._probing)
        heard_of = (board.storing.keys(), board.leaving, self._absent.keys(), self._probing.keys())
        return (
            not board.num_resets
            and len(unknown) <= num_free
            and all(names.isdisjoint(unknown) for names in heard_of)
        )

    def _ask(self, asks: Mapping[ObjectName, _Ask]) -> None:
        self._probing.update(asks)
        self._asked.extend(asks)

    def _look_closer(self, name: ObjectName, ask: _Ask) -> LookupResult:
        board = self._board
        if name in board.storing:
            return LookupResult.HIT_PENDING
        earlier = self._probing.get(name)
        if name in self._absent:
            self._absent[name] = True
        elif earlier is ask:
            return LookupResult.RETRY  # a key that is there twice
        elif earlier is not None:
            # It took too long. Whoever asks next asks the store anew.
            del self._probing[name]
            board.counters["lookup_timeouts"] += 1
        elif len(self._probing) >= board.settings.num_lookups_max:
            board.counters["dropped_lookups"] += 1
        elif not board.is_leaving(name):
            self._ask({name: ask})
            return LookupResult.RETRY
        return LookupResult.MISS

    def end_step(self) -> None:
        """Forget the absences that were told, and start the step's probes. Holds the lock."""
        most = self._board.settings.num_lookups_max
        untold = [name for name, is_told in self._absent.items() if not is_told]
        self._absent = dict.fromkeys(untold[-most:], False)
        self._queue.extend(self._asked)
        self._asked.clear()
        num_idle = self._board.settings.num_threads_max - self._num_pulling
        num_new = max(0, min(num_idle, len(self._queue) - self._num_pulling))
        self._num_pulling += num_new
        self._board.pool.submit(Lane.PROBE, *([self._pull] * num_new))

    def num_waiting(self) -> int:
        """Return how many keys have no answer yet."""
        return len(self._probing)

    def _pull(self) -> None:
        """Probe one key of the queue, on a worker, and come again if there are more."""
        with self._board.lock:
            name = self._queue.popleft() if self._queue else None
            ask = self._probing.get(name) if name is not None else None
        try:
            if name is not None and ask is not None:
                self._probe(_Probe(name, ask))
        finally:
            with self._board.lock:
                if self._queue:
                    self._board.pool.submit(Lane.PROBE, self._pull)
                else:
                    self._num_pulling -= 1

    def _probe(self, probe: _Probe) -> None:
        board = self._board
        with board.lock:
            if self._probing.get(probe.name) is not probe.ask:
                return  # nobody waits for it any more
            if board.is_leaving(probe.name):
                self._end(probe)
                return
            board.counters["probes"] += 1
            num_deletions = board.num_deletions
        try:
            path = board.path_of(probe.name)
            start = board.client.read_start(path, HEADER_BYTES, board.object_bytes)
            header = self._check(start, probe.name)
        except ObjectStoreError as error:
            self._failed(probe, error)
        except CorruptChunkError:
            self._damaged(probe)
        else:
            self._found(probe, header, num_deletions)

    def _check(self, start: Buffer, name: ObjectName) -> ChunkHeader:
        board = self._board
        header = decode_header(start, board.env.name)
        found = (*board.names_of([header.key]), header.namespace_digest, header.payload_bytes)
        if found != (name, board.digest, board.slots.chunk_bytes):
            raise CorruptChunkError(board.env.name, "an object holds another chunk than it should")
        return header

    def _found(self, probe: _Probe, header: ChunkHeader, num_deletions: int) -> None:
        board = self._board
        with board.lock:
            board.health.answered()
            self._end(probe)
            if header.expires_at_s <= board.env.clock.wall_s():
                board.counters["probe_misses"] += 1
                self._removals.remove([probe.name], RemovalReason.EXPIRED)
                return
            board.counters["probe_hits"] += 1
            board.note_read(probe.name, header.expires_at_s, num_deletions)

    def _damaged(self, probe: _Probe) -> None:
        with self._board.lock:
            self._end(probe)
            self._board.counters["probe_misses"] += 1
            self._removals.remove([probe.name], RemovalReason.CORRUPT)

    def _failed(self, probe: _Probe, error: ObjectStoreError) -> None:
        board = self._board
        if error.kind is FailureKind.WRONG_SIZE:
            self._damaged(probe)
            return
        if error.kind is FailureKind.NOT_FOUND:
            with board.lock:
                board.health.answered()
                board.counters["probe_misses"] += 1
                if board.forget(probe.name):
                    board.say(EventKind.REMOVED, [probe.name], RemovalReason.EXTERNAL)
                self._end(probe, is_absent=True)
            return
        board.failed(error, "looking up")
        with board.lock:
            if error.kind in RETRIED and probe.num_tries < board.settings.num_tries:
                board.counters["retries"] += 1
                delay_s = board.backoff_s(probe.num_tries)
                again = probe._replace(num_tries=probe.num_tries + 1)
                board.pool.submit(Lane.PROBE, partial(self._probe, again), delay_s=delay_s)
                return
            board.counters["probe_unknown"] += 1
            self._end(probe, is_absent=True)

    def _end(self, probe: _Probe, *, is_absent: bool = False) -> None:
        if self._probing.get(probe.name) is probe.ask:
            del self._probing[probe.name]
            if is_absent:
                self._absent[probe.name] = False
