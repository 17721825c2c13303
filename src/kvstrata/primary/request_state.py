"""What the primary remembers of one request: its trail, its copies, its protected chunks."""

from collections.abc import Sequence

from typing_extensions import override

from kvstrata.core.clock import Clock
from kvstrata.core.errors import ContractError
from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import RequestTrail
from kvstrata.core.request import ReqContext
from kvstrata.core.tenants import TenantResolver


class RequestState:
    """One request in the primary; also the owner of the slots that it writes.

    Attributes:
        loading: Chunk to slot, for each chunk that the request has pinned.
        reloads: The same again for chunks that it has pinned more than one time.
        num_storing: Slots that it writes.
        is_live: Between `on_new_request` and `on_request_finished`.
        key_expires_at_s: The same for single chunks, where retention ranges say so.
        touched: Its chunks as last touched, in prefix order.
        offered: Chunks that it offered for storing, in order.
        expires_at_s: Wall time at which what it stores must be gone; None for never.
    """

    __slots__ = (
        "ctx",
        "expires_at_s",
        "is_live",
        "key_expires_at_s",
        "loading",
        "num_storing",
        "offered",
        "protected",
        "reloads",
        "touched",
        "trail",
    )

    ctx: ReqContext
    trail: RequestTrail
    loading: dict[OffloadKey, int]
    reloads: list[tuple[OffloadKey, int]]
    num_storing: int
    protected: list[OffloadKey]
    is_live: bool
    key_expires_at_s: dict[OffloadKey, float]
    touched: Sequence[OffloadKey]
    offered: list[OffloadKey]
    expires_at_s: float | None

    def __init__(self, ctx: ReqContext, trail: RequestTrail) -> None:
        self.ctx = ctx
        self.trail = trail
        self.loading = {}
        self.reloads = []
        self.num_storing = 0
        self.protected = []
        self.is_live = False
        self.key_expires_at_s = {}
        self.touched = ()
        self.offered = []
        self.expires_at_s = None

    def apply_ranges(self, tokens_per_chunk: int, wall_s: float) -> None:
        """Work out priority and lifetime of single chunks from the retention hint."""
        priorities = self.trail.key_priority
        if not isinstance(priorities, dict):
            return
        for i, key in enumerate(dict.fromkeys([*self.touched, *self.offered])):
            start, end = i * tokens_per_chunk, (i + 1) * tokens_per_chunk
            for span in self.ctx.hints.retention:
                if end <= span.start or (span.end is not None and start >= span.end):
                    continue
                if span.priority is not None:
                    priorities[key] = span.priority
                if span.ttl_s is not None:
                    self.key_expires_at_s.setdefault(key, wall_s + span.ttl_s)

    @property
    def is_idle(self) -> bool:
        """Whether no copy of the request is open."""
        return not (self.loading or self.num_storing)

    @override
    def __repr__(self) -> str:
        return f"request {self.ctx.req_id!r}"


class RequestTable:
    """The states of all requests that are live or have copies open."""

    def __init__(self, tenants: TenantResolver, clock: Clock) -> None:
        self._tenants = tenants
        self._clock = clock
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def start(self, ctx: ReqContext) -> RequestState:
        """Make the state of a new request.

        Raises:
            ContractError: A request of this id is live already.
        """
        state = self._states.get(ctx.req_id)
        if state is None:
            state = self.get(ctx)
        elif state.is_live:
            raise ContractError(f"request {ctx.req_id!r} is live already")
        state.is_live = True
        return state

    def find(self, req_id: str) -> RequestState | None:
        """Return the state of a request, if there is one."""
        return self._states.get(req_id)

    def get(self, ctx: ReqContext) -> RequestState:
        """Return the state of a request; one that is not known gets one until it is idle."""
        state = self._states.get(ctx.req_id)
        if state is None:
            state = self._states[ctx.req_id] = self._make(ctx)
        return state

    def _make(self, ctx: ReqContext) -> RequestState:
        hints = ctx.hints
        tenant = self._tenants.resolve(ctx)
        pool = tenant.name if tenant.config.quota < 1 else None
        ranged: dict[OffloadKey, int] | None = {} if hints.retention else None
        state = RequestState(ctx, RequestTrail(hints.priority, hints.session, ranged, pool))
        lifetimes = [t for t in (hints.ttl_s, tenant.config.ttl_s) if t is not None]
        if lifetimes:
            state.expires_at_s = self._clock.wall_s() + min(lifetimes)
        return state

    def drop_if_done(self, state: RequestState) -> None:
        """Forget the state of a request that is neither live nor has a copy open."""
        if not state.is_live and state.is_idle:
            self._states.pop(state.ctx.req_id, None)
