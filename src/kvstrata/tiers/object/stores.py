"""Stores: slots into objects, written one time, within the cap."""

from functools import partial
from typing import Final

from kvstrata.core.events import EventKind
from kvstrata.core.results import StoreJob
from kvstrata.tiers.chunk_format import KEY_BYTES_MAX, NEVER_S, encode_header
from kvstrata.tiers.jobs import Outcome
from kvstrata.tiers.object.board import Board, Copy, CopyState
from kvstrata.tiers.object.client import RETRIED, ObjectStoreError
from kvstrata.tiers.object.index import UNVERIFIED_S, Entry, ObjectName
from kvstrata.tiers.object.removal import POSTPONE_S, Removals
from kvstrata.tiers.object.workers import Lane

_ROOM_WAIT_S: Final = 0.5


class Stores:
    """Copies from slots into the store."""

    def __init__(self, board: Board, removals: Removals) -> None:
        self._board = board
        self._removals = removals

    def submit(self, job: StoreJob) -> None:
        """Queue a job's chunks, and refuse those that find the queue full. Holds the lock."""
        board = self._board
        settings = board.settings
        deadline_s = board.env.clock.now_s() + settings.store_timeout_s
        expiries = job.expires_at_s or [NEVER_S] * len(job.keys)
        num_free = settings.num_queued_stores_max - board.storing.total()
        names = board.names_of(job.keys)
        copies = [
            Copy(job, key, name, slot, deadline_s, expires_at_s)
            for key, name, slot, expires_at_s in zip(
                job.keys, names, job.slots, expiries, strict=False
            )
        ]
        board.open(job, copies)
        for i, copy in enumerate(copies):
            if settings.read_only or i >= num_free or len(copy.key) > KEY_BYTES_MAX:
                board.counters["dropped_stores"] += 1
                board.settle(copy, Outcome.REFUSED)
        waiting = [copy for copy in copies if copy.state is CopyState.WAITING]
        board.pool.submit(Lane.STORE, *(partial(self._store, copy) for copy in waiting))

    def _store(self, copy: Copy) -> None:
        """Try one time, on a worker."""
        board = self._board
        with board.guarding(copy):
            with board.lock:
                victims = self._begin(copy)
            if copy.state is not CopyState.LANDING:
                return
            result: bool | ObjectStoreError | None = None  # None: what nobody foresaw
            try:
                if victims:
                    self._removals.evict(victims)
                result = self._write(copy)
            except ObjectStoreError as error:
                result = error
                board.failed(error, "storing")
            finally:
                with board.lock:  # at one time, so that the room is either reserved or used
                    board.writing.discard(copy.name)
                    board.index.reserved_bytes -= board.object_bytes
                    self._end(copy, result)
                    board.room_made.notify_all()

    def _begin(self, copy: Copy) -> dict[ObjectName, Entry]:
        """Reserve room, and let the copy land if it has something to write; return who leaves."""
        board = self._board
        while copy.state is CopyState.WAITING:
            if copy.name in board.writing or board.is_leaving(copy.name):
                board.pool.submit(Lane.STORE, partial(self._store, copy), delay_s=POSTPONE_S)
                return {}
            if board.index.holds(copy.name, board.env.clock.wall_s()):
                board.settle(copy, Outcome.PRESENT)
                return {}
            victims = board.index.make_room(board.object_bytes, board.may_leave)
            board.leaving.update(victims)
            if victims or board.index.fits(board.object_bytes):
                board.writing.add(copy.name)
                board.index.reserved_bytes += board.object_bytes
                copy.state = CopyState.LANDING
                copy.num_tries += 1
                return victims
            if not (board.index.leaving_bytes or board.index.reserved_bytes):
                board.counters["dropped_stores"] += 1
                board.settle(copy, Outcome.REFUSED)
                return {}
            board.room_made.wait(_ROOM_WAIT_S)  # others on their way out, or in, decide
        return {}

    def _write(self, copy: Copy) -> bool:
        board = self._board
        payload = board.slots[copy.slot]
        header = encode_header(copy.key, payload, board.digest, copy.expires_at_s)
        return board.client.create(board.path_of(copy.name), (header, payload))

    def _end(self, copy: Copy, result: bool | ObjectStoreError | None) -> None:  # noqa: FBT001
        if isinstance(result, bool):
            self._written(copy, is_written=result)
        elif result is not None and copy.state is CopyState.LANDING:
            self._failed(copy, result)

    def _written(self, copy: Copy, *, is_written: bool) -> None:
        board = self._board
        board.health.answered()
        is_void = board.is_leaving(copy.name)
        # What was there already is known to exist, but not yet to be whole.
        board.note(copy.name, copy.expires_at_s if is_written else UNVERIFIED_S)
        if is_written and not is_void:
            board.say(EventKind.STORED, [copy.name], None)
        outcome = Outcome.ARRIVED if is_written else Outcome.PRESENT
        board.settle(copy, Outcome.FAILED if is_void else outcome)

    def _failed(self, copy: Copy, error: ObjectStoreError) -> None:
        board = self._board
        is_late = board.env.clock.now_s() >= copy.deadline_s
        if error.kind in RETRIED and copy.num_tries < board.settings.num_tries and not is_late:
            copy.state = CopyState.WAITING
            board.counters["retries"] += 1
            delay_s = board.backoff_s(copy.num_tries)
            board.pool.submit(Lane.STORE, partial(self._store, copy), delay_s=delay_s)
        else:
            board.settle(copy, Outcome.FAILED)
