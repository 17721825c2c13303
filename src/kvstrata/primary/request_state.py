"""What the primary remembers of one request: its trail, its copies, its protected chunks."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from typing_extensions import override

from kvstrata.core.clock import Clock
from kvstrata.core.errors import ContractError
from kvstrata.core.events import PRIMARY_MEDIUM
from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import RequestTrail
from kvstrata.core.request import NO_HINTS, PRIORITY_DEFAULT, ReqContext
from kvstrata.core.stats import NO_JOB, JobStats
from kvstrata.core.tenants import TenantResolver
from kvstrata.primary.run_table import Held


class RequestState(RequestTrail):
    """One request in the primary, its trail included; also the owner of the slots that it writes.

    Attributes:
        loads: What the request loads, one record for each `prepare_load` not yet completed.
        num_storing: Slots that it writes.
        copying_since_s: When the first of the copies that are open began.
        protected: Its chunks that are protected since it was preempted.
        is_live: Between `on_new_request` and `on_request_finished`.
        is_barred: It computes with weights that were replaced: nothing of it is stored.
        touched: Its chunks as last touched, in prefix order.
        offered: Chunks that it offered for storing, in order.
    """

    num_storing: int = 0
    copying_since_s: float = 0.0
    protected: Held | None = None
    is_live: bool = False
    is_barred: bool = False
    touched: Sequence[OffloadKey] = ()

    def __init__(self, ctx: ReqContext) -> None:
        self.runs = []
        self.ctx = ctx
        self.loads: list[Held] = []
        self.offered: list[OffloadKey] = []

    def used_keys(self) -> list[OffloadKey]:
        """Return all chunks of the request, as far as it has named them, in prefix order."""
        return list(dict.fromkeys([*self.touched, *self.offered]))

    def find_loads(self, keys: Collection[OffloadKey]) -> tuple[list[Held], list[OffloadKey]]:
        """Find keys in the open loads, each one time; return what was found and the rest.

        A load of exactly these keys comes before older ones that share some with it.
        """
        unknown = list(dict.fromkeys(keys))
        for load in self.loads:
            if len(load.keys) == len(unknown) and set(load.keys) == set(unknown):
                return [load], []
        found: list[Held] = []
        for load in self.loads:
            taken = [key for key in unknown if key in load.keys]
            if taken:
                found.append(replace(load, keys=taken, num_splits=-1))
                unknown = [key for key in unknown if key not in taken]
        return found, unknown

    def close_loads(self, found: Iterable[Held]) -> None:
        """Close, in part or as a whole, what `find_loads` found in the open loads."""
        for done in found:
            if any(load is done for load in self.loads):
                self.loads = [load for load in self.loads if load is not done]
                continue
            for i, load in enumerate(self.loads):
                if load.epoch == done.epoch and set(done.keys) <= set(load.keys):
                    rest = [key for key in load.keys if key not in done.keys]
                    kept = replace(load, keys=rest, num_splits=-1)
                    self.loads[i : i + 1] = [kept] if rest else []
                    break

    def apply_ranges(self, tokens_per_chunk: int, wall_s: float) -> None:
        """Work out priority and lifetime of single chunks from the retention hint."""
        priorities = dict(self.key_priority or {})
        lifetimes = dict(self.key_expires_at_s or {})
        for i, key in enumerate(self.used_keys()):
            start, end = i * tokens_per_chunk, (i + 1) * tokens_per_chunk
            for span in self.ctx.hints.retention:
                if end <= span.start or (span.end is not None and start >= span.end):
                    continue
                if span.priority is not None:
                    priorities[key] = span.priority
                if span.ttl_s is not None:
                    lifetimes.setdefault(key, wall_s + span.ttl_s)
        self.key_priority, self.key_expires_at_s = priorities, lifetimes

    @property
    def is_idle(self) -> bool:
        """Whether no copy of the request is open."""
        return not (self.loads or self.num_storing)

    @override
    def __repr__(self) -> str:
        return f"request {self.ctx.req_id!r}"


class RequestTable:
    """The states of all requests that are live or have copies open, by id in `states`."""

    def __init__(
        self, tenants: TenantResolver, clock: Clock, need_classes: Callable[[], None]
    ) -> None:
        """Start without requests; `need_classes` is called before one with a class or pool."""
        self._need_classes = need_classes
        self._tenants = tenants
        self._clock = clock
        self.states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self.states)

    def start(self, ctx: ReqContext) -> RequestState:
        """Make the state of a new request.

        Raises:
            ContractError: A request of this id is live already.
        """
        state = self.states.get(ctx.req_id)
        if state is None:
            state = self.states[ctx.req_id] = self._make(ctx)
        elif state.is_live:
            raise ContractError(f"request {ctx.req_id!r} is live already")
        state.is_live = True
        return state

    def find(self, req_id: str) -> RequestState | None:
        """Return the state of a request, if there is one."""
        return self.states.get(req_id)

    def get(self, ctx: ReqContext) -> RequestState:
        """Return the state of a request; one that is not known gets one until it is idle."""
        state = self.states.get(ctx.req_id)
        if state is None:
            state = self.states[ctx.req_id] = self._make(ctx)
        return state

    def _make(self, ctx: ReqContext) -> RequestState:
        state = RequestState(ctx)
        hints = ctx.hints
        if hints is NO_HINTS and self._tenants.is_plain_by_default:
            return state
        tenant = self._tenants.resolve(ctx)
        state.priority, state.session = hints.priority, hints.session
        state.pool = tenant.name if tenant.config.quota < 1 else None
        if hints.retention or state.priority != PRIORITY_DEFAULT or state.pool is not None:
            self._need_classes()
        lifetimes = [t for t in (hints.ttl_s, tenant.config.ttl_s) if t is not None]
        if lifetimes:
            state.expires_at_s = self._clock.wall_s() + min(lifetimes)
        return state

    def copies(self, now_s: float) -> list[JobStats]:
        """Return the open copies, one record for each request and direction. Thread: any."""
        jobs = []
        for state in list(self.states.values()):
            num_loading = sum(len(load.keys) for load in list(state.loads))
            for kind, num_chunks in (("store", state.num_storing), ("load", num_loading)):
                if num_chunks:
                    age_s = now_s - state.copying_since_s
                    jobs.append(
                        JobStats(NO_JOB, kind, PRIMARY_MEDIUM, num_chunks, age_s, state.ctx.req_id)
                    )
        return sorted(jobs, key=lambda job: -job.age_s)

    def num_loading(self) -> int:
        """Count the distinct chunks that copies read. Thread: any."""
        states = list(self.states.values())
        return len({key for state in states for load in list(state.loads) for key in load.keys})

    def has_copies(self) -> bool:
        """Say whether any request has a copy open."""
        return any(not state.is_idle for state in self.states.values())

    def drop_if_done(self, state: RequestState) -> None:
        """Forget the state of a request that is neither live nor has a copy open."""
        if not state.is_live and state.is_idle:
            self.states.pop(state.ctx.req_id, None)
