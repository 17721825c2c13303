"""The inventory behind `max_bytes`: what is below the URL, counted at start and now and then."""

import re
from functools import partial
from typing import Final

from kvstrata.core.events import EventKind, RemovalReason
from kvstrata.tiers.object.board import Board
from kvstrata.tiers.object.client import ObjectStoreError
from kvstrata.tiers.object.removal import Removals
from kvstrata.tiers.object.workers import Lane

OUR_PATH: Final = re.compile(
    r"[0-9a-f]{32}/(?:[0-9a-f]{2}/(?:[0-9a-f]{2})+|x[0-9a-f]/x[0-9a-f]{64})"
)
"""Paths that this tier gives to objects, in any namespace; no others are counted or removed."""

_RETRY_S_MAX: Final = 30.0


class Inventory:
    """Keeps the index equal to the store, where the capacity is owned here.

    Until the first listing has come, stores wait: nothing is written that is not counted.
    """

    def __init__(self, board: Board, removals: Removals) -> None:
        self._board = board
        self._removals = removals
        self._next_s = board.env.clock.now_s()
        self._is_running = False
        self.is_known = board.settings.cap_bytes is None
        if not self.is_known:
            board.pool.hold(Lane.STORE)
            self.end_step()

    def end_step(self) -> None:
        """Start a listing if one is due. The caller holds the lock."""
        board = self._board
        if board.settings.cap_bytes is None or self._is_running:
            return
        if board.env.clock.now_s() >= self._next_s:
            self._is_running = True
            board.pool.submit(Lane.UPKEEP, self._list)

    def _list(self, num_tries: int = 1) -> None:
        board = self._board
        with board.lock:
            board.recent.clear()
        try:
            found = [each for each in board.client.find(None) if OUR_PATH.fullmatch(each.path)]
        except ObjectStoreError as error:
            board.failed(error, "listing")
            delay_s = min(_RETRY_S_MAX, board.backoff_s(num_tries))
            board.pool.submit(Lane.UPKEEP, partial(self._list, num_tries + 1), delay_s=delay_s)
            return
        found.sort(key=lambda each: each.modified_s)
        with board.lock:
            listed = {board.name_of(each.path): (each.num_bytes, each.modified_s) for each in found}
            gone = board.index.adopt(
                listed, lambda name: name in board.recent or name in board.writing
            )
            if gone:
                board.say(EventKind.REMOVED, gone, RemovalReason.EXTERNAL)
            self._next_s = board.env.clock.now_s() + board.settings.relist_s
            self._is_running = False
            is_first, self.is_known = not self.is_known, True
            victims = board.index.make_room(0, board.may_leave)
            board.leaving.update(victims)
        if is_first:
            board.pool.release(Lane.STORE)
        try:
            self._removals.evict(victims)  # where the cap is lower than it was
        except ObjectStoreError as error:
            board.failed(error, "evicting")
