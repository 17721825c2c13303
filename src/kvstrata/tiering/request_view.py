"""What the orchestrator remembers of one request: what it may use, waits for, and got."""

from dataclasses import dataclass, field

from kvstrata.core.keys import OffloadKey
from kvstrata.core.request import ReqContext
from kvstrata.primary.run_table import Held


@dataclass(slots=True, eq=False)
class RequestView:
    """One request above the tiers.

    Attributes:
        ctx: The request.
        serial: Age: requests that came earlier have lower numbers.
        load_mask: Tiers that it may load from.
        store_mask: Tiers that it may store to.
        deadline_s: Until when it waits for tiers; None while it has not begun to wait.
        failed: Chunks whose load failed for it: not tried again.
        held: Chunks fetched for it and kept until it loads them.
        fetched: From which tier each of those came.
        sources: Chunks loaded by tier name, the primary included.
        waited_s: Time between first having to wait and the answer.
    """

    ctx: ReqContext
    serial: int
    load_mask: int
    store_mask: int
    deadline_s: float | None = None
    wait_began_s: float | None = None
    failed: set[OffloadKey] = field(default_factory=set)
    held: list[Held] = field(default_factory=list)
    held_until_s: float = 0.0
    fetched: dict[OffloadKey, str] = field(default_factory=dict)
    sources: dict[str, int] = field(default_factory=dict)
    waited_s: float = 0.0
