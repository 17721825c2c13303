"""The connector beside an engine's scheduler: what to load and store, and what became of it."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kvstrata.connector.admission import LoadGate
from kvstrata.connector.config import GroupKind, SchedulerOffloadConfig
from kvstrata.connector.jobs import JobKind, JobTable
from kvstrata.connector.loads import Loads
from kvstrata.connector.messages import CopyJob, LoadOutcome, Match, StepMessage, WorkerOutput
from kvstrata.connector.protocols import EngineRequest, StepOutput
from kvstrata.connector.records import RecordBook, RequestRecord
from kvstrata.connector.requests import FoundPrefix, RequestOffloadState
from kvstrata.connector.stores import Stores
from kvstrata.core.clock import Clock, SystemClock
from kvstrata.core.errors import ContractError
from kvstrata.core.events import OffloadingEvent
from kvstrata.core.manager import OffloadingManager, RequestOffloadingContext, ShutdownReport
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.core.stats import Stats

logger = logging.getLogger("kvstrata.connector")

ASK_AGAIN: Final = Match(None, is_async=False)
NOTHING: Final = Match(0, is_async=False)
NO_OFFLOADING: Final = RequestOffloadingContext(store=False, load=False)


class OffloadingConnectorScheduler:
    """Decides which chunks move between engine blocks and slots; the workers move them.

    The order of calls is in the package's docstring. Thread: one, the engine scheduler's. Blocks:
    never, except `shutdown`.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        config: SchedulerOffloadConfig,
        *,
        clock: Clock | None = None,
    ) -> None:
        """Take the manager, which is owned from now on, and a description of the engine."""
        self.manager = manager
        self.config = config
        self._clock = clock or SystemClock()
        self._jobs = JobTable(config, self._clock)
        self._loads = Loads(manager, config, self._jobs, self._clock)
        self._stores = Stores(manager, self._jobs)
        self._gate = LoadGate(config.num_engine_tokens)
        self._book = RecordBook()
        self._states: dict[str, RequestOffloadState] = {}
        self._outcomes: list[LoadOutcome] = []
        self._step = 1
        if self.off_reason:
            logger.warning("nothing is offloaded: %s", self.off_reason)

    @property
    def off_reason(self) -> str | None:
        """Why nothing can be loaded, and so nothing is stored either; None if it can."""
        for i, group in enumerate(self.config.groups):
            if group.kind is GroupKind.REQUIRED:
                return f"groups[{i}] holds state that every hit needs and that can't be offloaded"
        return None

    def on_new_request(self, request: EngineRequest) -> None:
        """Start a request.

        Raises:
            ContractError: A request of this id is live already.
        """
        ctx = ReqContext(request.req_id, request.kv_transfer_params)
        wanted = self.manager.on_new_request(ctx)
        if self.off_reason:
            wanted = NO_OFFLOADING
        self._states[request.req_id] = RequestOffloadState(self.config, request, ctx, wanted)

    def get_num_new_matched_tokens(self, request: EngineRequest, num_local_tokens: int) -> Match:
        """Say how many tokens beyond the engine's own can be loaded. Pins nothing.

        Raises:
            ContractError: The request is not known.
        """
        state = self._state_of(request)
        if state.has_blocks:
            # The engine took them back after a failed load.
            self._gate.forget(request.req_id)
            state.lose_blocks()
        state.found = FoundPrefix(num_local_tokens, num_local_tokens)
        if not state.offloading.load:
            return NOTHING
        if state.load_failed:
            return NOTHING if self._gate.may_compute(request.req_id) else self._wait(state)
        if state.num_open_stores and state.record.num_preemptions:
            return self._wait(state)  # what it had computed will be there in a moment
        found = self._loads.find(state, num_local_tokens)
        if found is None:
            return self._wait(state)
        if found.end > num_local_tokens:
            if not self._gate.may_start(request.req_id, request.num_tokens):
                return self._wait(state)
            state.found = found
        self._end_wait(state)
        num_tokens = state.found.end - num_local_tokens
        return Match(num_tokens, is_async=num_tokens > 0)

    def _wait(self, state: RequestOffloadState) -> Match:
        if state.waits_since_s is None:
            state.waits_since_s = self._clock.now_s()
        return ASK_AGAIN

    def _end_wait(self, state: RequestOffloadState) -> None:
        if state.waits_since_s is not None:
            state.record.wait_s += self._clock.now_s() - state.waits_since_s
            state.waits_since_s = None

    def update_state_after_alloc(
        self,
        request: EngineRequest,
        block_ids: Sequence[Sequence[int]],
        num_external_tokens: int,
    ) -> None:
        """Take in a waiting request's blocks, and start the load if tokens were promised.

        Raises:
            ContractError: The request is not known, or the tokens are not those of the last answer.
                Nothing was started.
        """
        state = self._state_of(request)
        found = state.found or FoundPrefix(0, 0)
        if num_external_tokens not in {0, found.end - found.num_local}:
            raise ContractError(
                f"request {request.req_id!r} gets {num_external_tokens} external tokens; the last "
                f"answer was {found.end - found.num_local}"
            )
        self._announce(state, block_ids, found.num_local)
        if not state.has_blocks:
            self._admit(state, found.num_local)
        if num_external_tokens:
            self._gate.on_load(request.req_id, request.num_tokens)
            self._loads.start(state, found)
        state.found = None

    def _announce(
        self, state: RequestOffloadState, block_ids: Sequence[Sequence[int]], num_local: int
    ) -> None:
        """Tell the fence which blocks are new in the table; local ones are shared, not new."""
        for group_state in state.groups:
            table = group_state.block_ids = tuple(block_ids[group_state.group_idx])
            if not state.has_blocks:
                group_state.num_announced = num_local // group_state.group.tokens_per_block
            self._jobs.hand_out(group_state.group_idx, table[group_state.num_announced :])
            group_state.num_announced = len(table)

    def _admit(self, state: RequestOffloadState, num_local: int) -> None:
        state.has_blocks = True
        state.num_final = num_local
        if state.record.num_preemptions == 0:
            state.record.admit(state.request.num_tokens, num_local)
        if state.offloading.load or state.offloading.store:
            state.extend_keys()
            self.manager.touch(state.keys_in_order(), state.ctx)

    def build_connector_meta(self, step_output: StepOutput) -> StepMessage:
        """Close the step: say what the workers have to copy and to wait for.

        Raises:
            ContractError: A request is scheduled and preempted in the same step.
        """
        preempted_ids = step_output.preempted_req_ids
        scheduled = step_output.num_scheduled_tokens
        if any(req_id in scheduled for req_id in preempted_ids):
            raise ContractError("a request is scheduled and preempted in the same step")
        for group_idx, block_ids in enumerate(step_output.new_block_ids):
            self._jobs.hand_out(group_idx, block_ids)
        stores = [
            job
            for req_id, num_tokens in scheduled.items()
            if (job := self._on_scheduled(req_id, num_tokens, step_output)) is not None
        ]
        self.manager.on_schedule_end(ScheduleEndContext(step_output.new_req_ids, preempted_ids))
        for req_id in preempted_ids:
            self._on_preempted(req_id)
        loads = self._loads.take_started()
        flush = self._jobs.conflicts([*loads, *stores])
        self._step += 1
        return StepMessage(self._step - 1, self._stores.take_early(), flush, loads, stores)

    def _on_scheduled(self, req_id: str, num_tokens: int, step: StepOutput) -> CopyJob | None:
        state = self._states.get(req_id)
        if state is None:
            return None
        num_computed = state.request.num_computed_tokens + num_tokens
        self._gate.on_scheduled(req_id)
        if num_computed >= state.request.num_tokens:
            self._gate.on_prefilled(req_id)
        if not state.offloading.store:
            return None
        return self._stores.on_scheduled(state, num_computed, step)

    def _on_preempted(self, req_id: str) -> None:
        state = self._states.get(req_id)
        if state is None:
            return
        if state.load_job_id is not None:
            raise ContractError(f"request {req_id!r} is preempted while it loads")
        if state.offloading.store:
            self._stores.on_preempted(state)
        self._gate.forget(req_id)
        state.record.num_preemptions += 1
        state.lose_blocks()

    def update_connector_output(self, outputs: Iterable[WorkerOutput]) -> Sequence[LoadOutcome]:
        """Take in what ranks report; return how loads ended, one outcome per load, oldest first."""
        for job in self._jobs.take_reports(outputs):
            if job.kind is JobKind.STORE:
                self._stores.settle(job)
            elif (outcome := self._loads.settle(job)) is not None:
                self._tell(job.state, outcome)
        for job in self._jobs.take_overdue():
            logger.warning(
                "job %d (%s, request %s) is overdue: %d of %d ranks have reported it",
                job.job.job_id, job.kind.value, job.job.req_id, len(job.reported),
                self.config.num_ranks,
            )  # fmt: skip
            if job.kind is JobKind.STORE:
                self._stores.give_up(job)
            else:
                self._tell(job.state, self._loads.give_up(job))
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _tell(self, state: RequestOffloadState, outcome: LoadOutcome) -> None:
        self._outcomes.append(outcome)
        if state.is_finished:
            self._book.end(state.record)

    def request_finished(self, request: EngineRequest, block_ids: Sequence[Sequence[int]]) -> None:
        """End a request. Its blocks may be reused at once, unless a load is in flight.

        Raises:
            ContractError: The request is not known.
        """
        state = self._state_of(request)
        if state.offloading.store and state.has_blocks and state.load_job_id is None:
            self._stores.on_finished(state, block_ids)
        self.manager.on_request_finished(state.ctx)
        self._gate.forget(request.req_id)
        del self._states[request.req_id]
        self._end_wait(state)
        state.is_finished = True
        if state.load_job_id is None:
            self._book.end(state.record)

    def has_pending_work(self) -> bool:
        """Say whether steps are still needed, though nothing may be left to compute."""
        return bool(
            len(self._jobs)
            or self._outcomes
            or self._stores.early
            or self.manager.has_pending_work()
        )

    def served_tokens(self, request: EngineRequest) -> Mapping[str, int]:
        """Return what the request's last load was to bring, by medium: "cpu" or a tier's name."""
        return self._state_of(request).promised_tokens

    def take_request_records(self) -> list[RequestRecord]:
        """Return the records of requests that ended since the last call, oldest first."""
        return self._book.take()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the manager's events since the last call, oldest first."""
        return self.manager.take_events()

    def reset_cache(self) -> None:
        """Forget every chunk. Copies in flight end without effect."""
        self.manager.reset_cache()
        for state in self._states.values():
            state.found = None

    def get_stats(self) -> Stats:
        """Return the connector's own counters; `manager.get_stats()` has the rest."""
        gauges = {
            **self._jobs.stats(),
            "live_requests": len(self._states),
            "held_requests": self._gate.num_held,
        }
        counters = {
            "steps": self._step - 1,
            "failed_load_tokens": self._loads.num_failed_tokens,
            "overdue_jobs": self._jobs.num_overdue,
            "stray_results": self._jobs.num_stray_results,
        }
        return self._book.stats(gauges, counters)

    def shutdown(self, timeout_s: float = 10.0) -> ShutdownReport:
        """Shut the manager down. The workers are shut down already."""
        return self.manager.shutdown(timeout_s)

    def check(self) -> None:
        """Assert every invariant. For tests."""
        self._jobs.check()

    def _state_of(self, request: EngineRequest) -> RequestOffloadState:
        state = self._states.get(request.req_id)
        if state is None:
            raise ContractError(f"request {request.req_id!r} is not known")
        return state
