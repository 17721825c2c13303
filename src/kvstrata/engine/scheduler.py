"""Which tokens run in the next step: continuous batching, chunked prefill, preemption."""

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvstrata.connector.messages import LoadOutcome, Match
from kvstrata.connector.scheduler import OffloadingConnectorScheduler
from kvstrata.engine.block_table import BlockTables
from kvstrata.engine.model import Segment
from kvstrata.engine.request import Request, Status

NOTHING = Match(0, is_async=False)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """How much runs at once. `num_step_tokens_max` is also the size of a prefill chunk."""

    num_step_tokens_max: int = 256
    num_running_max: int = 16


DEFAULT_LIMITS = SchedulerLimits()


@dataclass(slots=True)
class StepPlan:
    """What one step does; the connector reads it as its `StepOutput`."""

    num_groups: int
    runs: dict[str, tuple[Request, int]] = field(default_factory=dict)
    new_req_ids: list[str] = field(default_factory=list)
    preempted_req_ids: list[str] = field(default_factory=list)
    new_block_ids: Sequence[Collection[int]] = ()

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]:
        """Tokens that this step computes, by request id."""
        return {req_id: count for req_id, (_, count) in self.runs.items()}

    @property
    def unfilled_block_ids(self) -> Sequence[Collection[int]]:
        """Blocks that somebody else fills: there are none in this engine."""
        return [()] * self.num_groups

    def get_block_ids(self, req_id: str) -> Sequence[Sequence[int]]:
        """Return the block tables of a request that runs in this step."""
        return self.runs[req_id][0].tables

    def segments(self) -> list[Segment]:
        """Return what the model is to compute, in the order of `runs`."""
        return [
            Segment(
                request.tokens[request.num_computed_tokens : request.num_computed_tokens + count],
                request.num_computed_tokens,
                request.tables,
            )
            for request, count in self.runs.values()
        ]


class Scheduler:
    """Decides; computes nothing. All calls to the connector's scheduler side are made here.

    Requests run in order of admission. One that lacks a block takes those of the request that
    was admitted last, which is computed again later, or loaded where it was offloaded.
    """

    def __init__(
        self,
        tables: BlockTables,
        limits: SchedulerLimits,
        connector: OffloadingConnectorScheduler | None,
    ) -> None:
        """Schedule over these blocks. Without a connector nothing is offloaded."""
        self._tables = tables
        self._limits = limits
        self._connector = connector
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._loading: dict[str, Request] = {}  # aborted ones too: a load keeps its blocks
        self._started: set[str] = set()

    @property
    def has_requests(self) -> bool:
        """Whether any request is not over, or holds blocks for a load."""
        return bool(self._waiting or self._running or self._loading)

    @property
    def is_loading(self) -> bool:
        """Whether the connector fills blocks at present."""
        return bool(self._loading)

    def add(self, request: Request) -> None:
        """Take a new request.

        Raises:
            ValueError: It can't ever fit into the blocks.
        """
        if not self._tables.fits(request.num_tokens_max):
            raise ValueError(f"{request.req_id}: needs more blocks than the engine has")
        if self._connector:
            self._connector.on_new_request(request)  # connector call 1
        self._waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request early; harmless when it is over."""
        if request.status in {Status.FINISHED, Status.ABORTED}:
            return
        if request.status is Status.RUNNING:
            self._running.remove(request)
        elif request.status is Status.WAITING:
            self._waiting.remove(request)
        is_loading = request.status is Status.LOADING
        self._end(request, Status.ABORTED, frees=not is_loading)

    def schedule(self) -> StepPlan:
        """Choose what runs in this step, and give it blocks."""
        plan = StepPlan(num_groups=len(self._tables.pools))
        budget = self._limits.num_step_tokens_max
        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            if self._grow(request, count, plan):
                self._run(plan, request, count)
                budget -= count
            index += 1
        if not plan.preempted_req_ids:
            self._admit(plan, budget)
        plan.new_block_ids = self._tables.take_new()
        return plan

    def finish_step(self, plan: StepPlan, next_tokens: Mapping[str, int]) -> list[Request]:
        """Account for a step that was computed; return the requests that are over."""
        over = []
        for request, count in plan.runs.values():
            request.num_computed_tokens += count
            request.counts.computed += count
            self._tables.publish(request)
            if request.req_id in next_tokens:
                request.tokens.append(next_tokens[request.req_id])
                if request.is_over:
                    self._running.remove(request)
                    self._end(request, Status.FINISHED)
                    over.append(request)
        return over

    def finish_load(self, outcome: LoadOutcome) -> None:
        """Let a request go on whose load ended, with what has arrived."""
        request = self._loading.pop(outcome.req_id)
        if request.status is Status.ABORTED:
            self._tables.release(request)
            return
        request.counts.loaded += outcome.num_computed_tokens - request.num_computed_tokens
        request.num_computed_tokens = outcome.num_computed_tokens
        if outcome.num_failed_tokens and not self._tables.truncate(
            request, outcome.num_computed_tokens
        ):
            self._restart(request)
            return
        self._tables.publish(request)
        request.status = Status.RUNNING
        self._running.append(request)

    def _grow(self, request: Request, count: int, plan: StepPlan) -> bool:
        """Get blocks for the next tokens, if need be from requests admitted later."""
        while not self._tables.grow(request, request.num_computed_tokens + count):
            victim = self._running[-1]
            if victim is request:
                return False  # what loads or what runs before it gives blocks back some time
            self._running.pop()
            victim.counts.preemptions += 1
            plan.preempted_req_ids.append(victim.req_id)
            self._restart(victim)
        return True

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Start waiting requests in order, as far as tokens and blocks go."""
        skipped: list[Request] = []
        while self._waiting and budget > 0:
            if len(self._running) + len(self._loading) >= self._limits.num_running_max:
                break
            request = self._waiting[0]
            num_local = self._tables.match(request)
            found = NOTHING
            if self._connector:  # connector call 2
                found = self._connector.get_num_new_matched_tokens(request, num_local)
            if found.num_tokens is None:  # worth waiting for: ask again, let others go first
                skipped.append(self._waiting.popleft())
                continue
            num_known = num_local + found.num_tokens
            count = 0 if found.is_async else min(request.num_tokens - num_known, budget)
            if not self._tables.allocate(request, num_local, num_known, num_known + count):
                break
            self._waiting.popleft()
            if self._connector:  # connector call 3
                self._connector.update_state_after_alloc(request, request.tables, found.num_tokens)
            request.num_computed_tokens = num_local
            request.counts.engine += num_local
            if found.is_async:
                request.status = Status.LOADING
                self._loading[request.req_id] = request
            else:
                request.status = Status.RUNNING
                self._running.append(request)
                self._run(plan, request, count)
                budget -= count
        self._waiting.extendleft(reversed(skipped))

    def _run(self, plan: StepPlan, request: Request, count: int) -> None:
        plan.runs[request.req_id] = (request, count)
        if request.req_id not in self._started:
            self._started.add(request.req_id)
            plan.new_req_ids.append(request.req_id)

    def _restart(self, request: Request) -> None:
        """Take a request's blocks away; it is the next to be admitted."""
        self._tables.release(request)
        request.num_computed_tokens = 0
        request.status = Status.WAITING
        self._waiting.appendleft(request)

    def _end(self, request: Request, status: Status, *, frees: bool = True) -> None:
        request.status = status
        request.finished_s = time.monotonic()
        self._started.discard(request.req_id)
        if self._connector:  # connector call 9
            num_groups = len(self._tables.pools)
            self._connector.request_finished(request, request.tables or [[]] * num_groups)
        if frees:
            self._tables.release(request)
