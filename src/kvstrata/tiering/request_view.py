"""What the orchestrator remembers of one request: what it may use, waits for, and got."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstrata.core.keys import OffloadKey
from kvstrata.core.request import ReqContext
from kvstrata.primary.run_table import Held
from kvstrata.tiering.tier_handle import TierHandle


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What a request got so far.

    Attributes:
        num_chunks_from: Chunks that it loaded, by the tier that each came from; "cpu" for what was
            in the primary already.
        num_missed: Chunks of its last lookup that were not loadable.
        waited_s: How long it waited for tiers.
        queued_s: Time between its start and its first step; None before that.
    """

    num_chunks_from: dict[str, int]
    num_missed: int
    waited_s: float
    queued_s: float | None


@dataclass(slots=True, eq=False)
class RequestView:
    """One live request above the tiers.

    Attributes:
        ctx: The request.
        serial: Age: requests that came earlier have lower numbers.
        began_s: When it came.
        loads: Tiers that it may load from, in order.
        stores: Tiers that it may store to.
        is_live: False once it has finished.
        deadline_s: Until when it waits for tiers; None while it has not begun to wait.
        failed: Chunks whose load failed for it: not tried again.
        held: Chunks fetched for it and kept until it loads them.
        is_loading: It began to load in this step; what is kept for it goes at the end of it.
        fetched: From which tier each of those came.
        stored: Chunks that it stored itself, where a tier wants to know what is used again.
        num_chunks_from, num_missed, queued_s: As in RequestRecord.
    """

    ctx: ReqContext
    serial: int
    began_s: float
    loads: Sequence[TierHandle]
    stores: Sequence[TierHandle]
    is_live: bool = True
    deadline_s: float | None = None
    failed: set[OffloadKey] = field(default_factory=set)
    held: list[Held] = field(default_factory=list)
    held_until_s: float = 0.0
    is_loading: bool = False
    fetched: dict[OffloadKey, str] = field(default_factory=dict)
    stored: set[OffloadKey] = field(default_factory=set)
    num_chunks_from: dict[str, int] = field(default_factory=dict)
    num_missed: int = 0
    queued_s: float | None = None
    _waits_since_s: float | None = None
    _waited_before_s: float = 0.0
    _waited_s: float = 0.0

    def is_late(self, now_s: float) -> bool:
        """Say whether it has waited as long as it may."""
        return self.deadline_s is not None and now_s >= self.deadline_s

    def note_waits(self, now_s: float) -> None:
        """It was told to ask again."""
        if self._waits_since_s is None:
            self._waits_since_s = now_s

    def note_answer(self, now_s: float) -> None:
        """It got an answer; there may be one for each of its groups, the last one counts."""
        if self._waits_since_s is not None:
            self._waited_s = now_s - self._waits_since_s

    def end_waiting(self) -> None:
        """It goes on; if it waits again, that is another time."""
        self._waited_before_s += self._waited_s
        self._waits_since_s, self._waited_s = None, 0.0

    def record(self) -> RequestRecord:
        """Return what is known of it now."""
        waited_s = self._waited_before_s + self._waited_s
        return RequestRecord(dict(self.num_chunks_from), self.num_missed, waited_s, self.queued_s)
