"""Keep what tiers serve to other hosts in step with what this host has."""

import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final

from kvstrata.core.clock import Clock
from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import RequestTrail
from kvstrata.core.request import ReqContext
from kvstrata.primary.chunk_store import ChunkStore
from kvstrata.tiering.promotion import Promotions
from kvstrata.tiering.request_view import RequestView
from kvstrata.tiering.survey import ask_tiers
from kvstrata.tiering.tier_handle import TierHandle

if TYPE_CHECKING:
    from kvstrata.core.tier import ChunkShelf
    from kvstrata.primary.run_table import Held

SHARE_FOR_OTHERS: Final = 8  # of the slots, one in so many may be fetched for others in a step


class Sharing:
    """The shelves of tiers that serve others: the primary's chunks, and on request those below.

    What others read is held, from one step's end to the next; a chunk that leaves in between is
    found out by its reader.
    """

    def __init__(self, store: ChunkStore, promotions: Promotions, clock: Clock) -> None:
        """Start without shelves."""
        self._store, self._promotions, self._clock = store, promotions, clock
        self._shelves: dict[TierHandle, ChunkShelf] = {}
        self._held: list[Held] = []

    def add(self, handle: TierHandle) -> None:
        """Begin to publish on the tier's shelf, if it has one."""
        shelf = handle.tier.shelf
        if shelf is None:
            return
        for run in self._store.table.all_runs()[0]:
            if run.owner is None:
                shelf.publish(run.keys, run.slots, run.expires_at_s)
        self._shelves[handle] = shelf
        self._store.shelves.append(shelf)

    def remove(self, handle: TierHandle) -> None:
        """Publish no more on the tier's shelf."""
        shelf = self._shelves.pop(handle, None)
        if shelf is not None:
            self._store.shelves.remove(shelf)
            shelf.clear()

    def park(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        """Keep a request's chunks, those that can be loaded, for the host that it names."""
        reader = ctx.hints.park_for
        if reader is not None:
            for shelf in self._shelves.values():
                shelf.park(list(keys), reader)

    def end_step(self, handles: Sequence[TierHandle]) -> None:
        """Hold what is being read, and fetch what others want and another tier has."""
        self.release()
        for asked_by, shelf in self._shelves.items():
            leased = [key for key in shelf.leased() if self._store.is_resident(key)]
            if leased:
                self._held.append(self._store.hold(leased))
            wanted = [key for key in shelf.take_wanted() if key not in self._store.table]
            if wanted:
                # The rest is asked for again; others' needs don't flush what this host uses.
                share = max(1, self._store.table.num_slots // SHARE_FOR_OTHERS)
                others = [handle for handle in handles if handle is not asked_by]
                shelf.deny(self._bring_up(wanted[:share], others))

    def _bring_up(
        self, keys: Sequence[OffloadKey], handles: Sequence[TierHandle]
    ) -> Sequence[OffloadKey]:
        """Begin to fetch chunks from these tiers; return those that none of them has."""
        # As the youngest of requests: it gives way first.
        view = RequestView(ReqContext("peers"), sys.maxsize, self._clock.now_s(), handles, ())
        answers = ask_tiers(keys, view)
        found = [(handle, [key]) for key in keys if (handle := answers.get(key)) is not None]
        self._promotions.reserve(found, RequestTrail(), view)
        return [key for key in keys if key not in answers]

    def release(self) -> None:
        """Hold nothing any more."""
        for held in self._held:
            self._store.table.unhold(held)
        self._held.clear()
