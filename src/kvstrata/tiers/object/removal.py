"""Removing objects: what was evicted, expired, deleted, found damaged, or is reset."""

import heapq
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from kvstrata.core.events import EventKind, RemovalReason
from kvstrata.tiers.object.board import Board
from kvstrata.tiers.object.client import RETRIED, ObjectStoreError
from kvstrata.tiers.object.index import Entry, ObjectName
from kvstrata.tiers.object.workers import Lane

POSTPONE_S: Final = 0.005
"""Pause of a request that has to wait for another one on the same object."""

_DELETE_BATCH: Final = 1000
_SHUNNED_MAX: Final = 65_536
_RESET_RETRY_S: Final = 1.0


class _Doomed(NamedTuple):
    names: list[ObjectName]
    told: list[ObjectName]  # those whose removal is an event
    reason: RemovalReason


class Removals:
    """Objects on their way out; from the first call on they count as gone."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def remove(self, names: Sequence[ObjectName], reason: RemovalReason) -> None:
        """Start removing objects in the background. The caller holds the lock."""
        board = self._board
        board.num_deletions += reason is RemovalReason.DELETED
        fresh = [name for name in dict.fromkeys(names) if name not in board.leaving]
        known = [name for name in fresh if board.forget(name)]
        if board.settings.read_only:
            if reason is RemovalReason.CORRUPT and len(board.leaving) < _SHUNNED_MAX:
                board.leaving.update(fresh)  # for good: it stays where it is, and is never served
            return
        board.leaving.update(fresh)
        # One that nobody knew of may not exist, so that no event may tell of its removal.
        told = set(known if reason is RemovalReason.DELETED else fresh)
        for start in range(0, len(fresh), _DELETE_BATCH):
            batch = fresh[start : start + _DELETE_BATCH]
            doomed = _Doomed(batch, [name for name in batch if name in told], reason)
            board.pool.submit(Lane.UPKEEP, partial(self._remove, doomed))

    def expire(self) -> None:
        """Start removing known objects that have expired, or idle. The caller holds the lock."""
        board = self._board
        wall_s = board.env.clock.wall_s()
        due = []
        while board.expiries and board.expiries[0][0] <= wall_s:
            _, _, name = heapq.heappop(board.expiries)
            if name in board.index and not board.index.holds(name, wall_s):
                due.append(name)
        if board.settings.idle_s is not None:
            due += board.index.idle(wall_s - board.settings.idle_s, board.may_leave)
        if due:
            self.remove(due, RemovalReason.EXPIRED)

    def evict(self, victims: dict[ObjectName, Entry]) -> None:
        """Remove, on this worker, objects that the index dropped to make room, marked as leaving.

        Raises:
            ObjectStoreError: Some may be left; they are known again.
        """
        board = self._board
        names = list(victims)
        try:
            self._delete(names)
        except BaseException:
            with board.lock:
                board.leaving.difference_update(names)
                board.index.stayed(victims)
                board.room_made.notify_all()
            raise
        with board.lock:
            board.leaving.difference_update(names)
            board.recent.update(names)
            board.index.left(victims)
            board.say(EventKind.REMOVED, names, RemovalReason.EVICTED)
            board.room_made.notify_all()

    def _delete(self, names: Sequence[ObjectName]) -> None:
        board = self._board
        for start in range(0, len(names), _DELETE_BATCH):
            batch = names[start : start + _DELETE_BATCH]
            board.client.delete([board.path_of(name) for name in batch])

    def _remove(self, doomed: _Doomed, num_tries: int = 1) -> None:
        board = self._board
        with board.lock:
            is_busy = any(name in board.writing for name in doomed.names)
        if is_busy:
            again = partial(self._remove, doomed, num_tries)
            board.pool.submit(Lane.UPKEEP, again, delay_s=POSTPONE_S)
            return
        try:
            self._delete(doomed.names)
        except ObjectStoreError as error:
            board.failed(error, "deleting")
            if error.kind in RETRIED and num_tries < board.settings.num_tries:
                again = partial(self._remove, doomed, num_tries + 1)
                board.pool.submit(Lane.UPKEEP, again, delay_s=board.backoff_s(num_tries))
                return
            with board.lock:
                board.counters["failed_deletes"] += len(doomed.names)
                board.leaving.difference_update(doomed.names)
                board.room_made.notify_all()
            return
        with board.lock:
            board.health.answered()
            board.leaving.difference_update(doomed.names)
            board.room_made.notify_all()
            board.say(EventKind.REMOVED, doomed.told, doomed.reason)

    def reset(self) -> None:
        """Start removing every object of the namespace; until then all of it counts as gone.

        The caller holds the lock. Stores that are submitted from now on wait for the end of it.
        """
        board = self._board
        board.num_resets += 1
        board.num_deletions += 1
        board.pool.hold(Lane.STORE)
        board.give_up([copy for copy in board.open_copies() if copy.is_store])
        board.index.forget_all(board.is_ours)
        board.pool.submit(Lane.UPKEEP, self._reset)

    def _reset(self) -> None:
        board = self._board
        with board.lock:
            is_busy = bool(board.writing)
        if is_busy:
            board.pool.submit(Lane.UPKEEP, self._reset, delay_s=POSTPONE_S)
            return
        try:
            if not board.settings.read_only:
                found = [board.name_of(each.path) for each in board.client.find(board.folder)]
                self._delete(found)
        except ObjectStoreError as error:
            board.failed(error, "resetting")
            board.pool.submit(Lane.UPKEEP, self._reset, delay_s=_RESET_RETRY_S)
            return
        with board.lock:
            board.index.forget_all(board.is_ours)
            board.num_resets -= 1
            board.events.note(EventKind.CLEARED, reason=RemovalReason.CLEARED)
            board.room_made.notify_all()
        board.pool.release(Lane.STORE)

    def remove_prefix(self, prefix: bytes) -> None:
        """Start removing objects by the start of their keys; until then they count as gone.

        The caller holds the lock. Stores that are submitted from now on wait for the end of it.
        """
        board = self._board
        board.num_deletions += 1
        board.leaving_prefixes.append(prefix)
        board.pool.hold(Lane.STORE)
        stores = [copy for copy in board.open_copies() if copy.is_store]
        board.give_up([copy for copy in stores if copy.key.startswith(prefix)])
        known = self._known_with(prefix)
        for name in known:
            board.forget(name)
        board.pool.submit(Lane.UPKEEP, partial(self._remove_prefix, prefix, known))

    def _known_with(self, prefix: bytes) -> list[ObjectName]:
        names = list(self._board.index.names())
        return [name for name in names if isinstance(name, bytes) and name.startswith(prefix)]

    def _remove_prefix(self, prefix: bytes, known: Sequence[ObjectName]) -> None:
        board = self._board
        again = partial(self._remove_prefix, prefix, known)
        with board.lock:
            is_busy = bool(board.writing)
        if is_busy:
            board.pool.submit(Lane.UPKEEP, again, delay_s=POSTPONE_S)
            return
        found: list[ObjectName] = []
        try:
            if not board.settings.read_only:
                folder = f"{board.folder}{prefix.hex()[:2]}/"
                names = (board.name_of(each.path) for each in board.client.find(folder))
                found = [n for n in names if isinstance(n, bytes) and n.startswith(prefix)]
                self._delete(found)
        except ObjectStoreError as error:
            board.failed(error, "deleting")
            board.pool.submit(Lane.UPKEEP, again, delay_s=_RESET_RETRY_S)
            return
        with board.lock:
            for name in found:
                board.forget(name)
            board.leaving_prefixes.remove(prefix)
            board.room_made.notify_all()
            board.say(EventKind.REMOVED, dict.fromkeys([*known, *found]), RemovalReason.DELETED)
        board.pool.release(Lane.STORE)
