"""A paged engine whose blocks hold patterns of the tokens behind them, so that wrong bytes show.

The KV of a token is a number made of all tokens up to it, the group, the layer and the rank. To
compute a token the engine reads the KV of all tokens it attends to and compares: one foreign or
stale byte is an AssertionError. Blocks that change hands are poisoned before the step writes them.
"""

import hashlib
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from kvstrata.build import build_manager
from kvstrata.connector import (
    BlockCopies,
    Copier,
    KVGroup,
    OffloadingConnectorScheduler,
    OffloadingConnectorWorker,
    SchedulerOffloadConfig,
    StepMessage,
    TensorLayout,
    make_copier,
)
from kvstrata.connector.matching import first_needed_token
from kvstrata.connector.messages import CopyResult, LoadOutcome
from kvstrata.connector.transfers import Task, Transfers, Urgency, run_task
from kvstrata.core.clock import Clock
from kvstrata.core.keys import JobId, OffloadKey, make_offload_key
from kvstrata.core.manager import OffloadingManager
from kvstrata.core.memory import SlotView
from kvstrata.core.namespace import hash_blocks
from kvstrata.core.request import ReqContext
from kvstrata.core.results import LookupResult
from kvstrata.policies.lru import LruPolicy
from kvstrata.primary.chunk_store import PrimaryLimits
from kvstrata.primary.manager import CPUOffloadingManager
from kvstrata.primary.region import HostRegion

POISON = 0xEEEE_EEEE_EEEE_EEEE
NULL = 0
LAYERS = 2
ITEM_BYTES = 8


def make_primary(
    kind: type[CPUOffloadingManager], num_slots: int, chunk_bytes: int
) -> CPUOffloadingManager:
    """A primary of a class that a test has changed."""
    region = HostRegion.create(num_slots, chunk_bytes)
    limits = PrimaryLimits(num_protected_max=num_slots // 2)
    return kind(region, LruPolicy(num_slots), limits=limits, close_region=region.close)


class Status(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    LOADED = "loaded"
    RUNNING = "running"
    DONE = "done"


@dataclass(eq=False)
class ToyRequest:
    """Also an `EngineRequest`."""

    req_id: str
    tokens: list[int]
    num_new_tokens: int
    tokens_per_hash: int
    kv_transfer_params: Mapping[str, Any] | None = None
    num_computed_tokens: int = 0
    status: Status = Status.WAITING
    tables: list[list[int]] = field(default_factory=list)
    has_run: bool = False
    num_prompt_tokens: int = 0
    num_tokens_computed: int = 0  # by the engine itself, again or not
    block_hashes: list[bytes] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)
        self.extend(())

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_wanted(self) -> int:
        return self.num_prompt_tokens + self.num_new_tokens

    def extend(self, tokens: Collection[int]) -> None:
        self.tokens += tokens
        self.block_hashes = hash_blocks(self.tokens, self.tokens_per_hash, known=self.block_hashes)
        for token in self.tokens[len(self.chain) :]:
            parent = self.chain[-1] if self.chain else 0
            digest = hashlib.blake2b(f"{parent}.{token}".encode(), digest_size=8).digest()
            self.chain.append(int.from_bytes(digest, "big"))

    def kv(self, start: int, end: int, salt: int) -> npt.NDArray[np.uint64]:
        """What the blocks have to hold for tokens `start` to `end`."""
        return np.array(self.chain[start:end], np.uint64) ^ np.uint64(salt)


@dataclass
class ToyStep:
    """Also a `StepOutput`."""

    tables: dict[str, list[list[int]]]
    num_groups: int
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    new_req_ids: list[str] = field(default_factory=list)
    preempted_req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[list[int]] = field(default_factory=list)
    unfilled_block_ids: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.new_block_ids = [[] for _ in range(self.num_groups)]
        self.unfilled_block_ids = [[] for _ in range(self.num_groups)]

    def get_block_ids(self, req_id: str) -> Sequence[Sequence[int]]:
        assert req_id in self.num_scheduled_tokens
        return self.tables[req_id]


class ManualTransfers(Transfers):
    """Runs tasks when told to, or when a step waits for them: any order can be made to happen."""

    def __init__(self) -> None:
        self.queued: list[Task] = []
        self.results: list[CopyResult] = []
        self.num_awaited = 0

    @override
    def submit(self, task: Task, urgency: Urgency) -> None:
        self.queued.append(task)

    @override
    def wait(self, job_ids: Collection[JobId], timeout_s: float) -> Collection[JobId]:
        for task in [task for task in self.queued if task.job.job_id in job_ids]:
            self.num_awaited += 1
            self.run(task)
        return ()

    def run(self, task: Task) -> None:
        self.queued.remove(task)
        self.results.append(run_task(task))

    def run_all(self) -> None:
        while self.queued:
            self.run(self.queued[0])

    def run_some(self, rng: random.Random) -> None:
        for task in rng.sample(self.queued, rng.randint(0, len(self.queued))):
            self.run(task)

    @override
    def take_results(self) -> list[CopyResult]:
        results, self.results = self.results, []
        return results

    @override
    def wait_for_results(self, timeout_s: float) -> None:
        if not self.results and self.queued:
            self.run(self.queued[0])

    @override
    def close(self, timeout_s: float) -> Collection[JobId]:
        self.run_all()
        return ()


class FaultyCopier(Copier):
    """Copies like the one it wraps, but lets some chunks fail, and copies nothing for those.

    A chunk fails at random, or when `fail_load_of` names its place among the slots of a load.
    """

    def __init__(self, inner: Copier, failure_rate: float, rng: random.Random) -> None:
        self.inner = inner
        self.failure_rate = failure_rate
        self.rng = rng
        self.fail_load_of: set[int] = set()
        self.num_stored_blocks = 0
        self.num_loaded_blocks = 0

    @override
    def mark(self) -> object:
        return self.inner.mark()

    @override
    def close(self) -> None:
        self.inner.close()

    def _pick(self, slots: Iterable[int]) -> set[int]:
        return {slot for slot in dict.fromkeys(slots) if self.rng.random() < self.failure_rate}

    @override
    def store(self, copies: Sequence[BlockCopies], mark: object) -> frozenset[int]:
        failed = self._pick(slot for c in copies for slot in c.slots)
        kept = without(copies, failed)
        self.num_stored_blocks += sum(len(c.slots) for c in kept)
        return self.inner.store(kept, mark) | failed

    @override
    def load(self, copies: Sequence[BlockCopies], mark: object) -> frozenset[int]:
        slots = list(dict.fromkeys(slot for c in copies for slot in c.slots))
        failed = self._pick(slots) | {slots[i] for i in self.fail_load_of if i < len(slots)}
        kept = without(copies, failed)
        self.num_loaded_blocks += sum(len(c.slots) for c in kept)
        return self.inner.load(kept, mark) | failed


def without(copies: Sequence[BlockCopies], slots: set[int]) -> list[BlockCopies]:
    kept = []
    for c in copies:
        rows = zip(c.block_ids, c.slots, c.parts, strict=True)
        left = [row for row in rows if row[1] not in slots]
        kept.append(BlockCopies(c.group_idx, *([row[i] for row in left] for i in range(3))))
    return kept


@dataclass
class ToySettings:
    groups: tuple[KVGroup, ...] = (KVGroup(4),)
    tokens_per_hash: int = 4
    num_blocks: int = 64
    num_slots: int = 64
    num_ranks: int = 1
    is_replicated: bool = False
    match_tokens: int | None = None
    tokens_per_step: int = 32
    failure_rate: float = 0.0
    with_local_cache: bool = False
    knows_capacity: bool = False
    store_threshold: int = 1
    with_threads: bool = False
    with_fence: bool = True
    seed: int = 0

    def config(self) -> SchedulerOffloadConfig:
        largest = max(group.tokens_per_block for group in self.groups)
        per_token = sum(largest // group.tokens_per_block for group in self.groups)
        capacity = (self.num_blocks - 1) // per_token * largest
        return SchedulerOffloadConfig(
            self.groups,
            self.tokens_per_hash,
            num_ranks=self.num_ranks,
            is_replicated=self.is_replicated,
            null_block_id=NULL,
            match_tokens=self.match_tokens,
            num_engine_tokens=capacity if self.knows_capacity else None,
        )


class Below(Protocol):
    """The tiers below a toy engine's primary, and what else happens in a step."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What a manager's configuration says of the tiers."""
        ...

    @property
    def clock(self) -> Clock | None:
        """The manager's time; None: the machine's."""
        ...

    def next_step(self) -> None:
        """Note that a step is over."""
        ...


MakeCopier = Callable[
    [SlotView, SchedulerOffloadConfig, int, Sequence[Sequence[Any]], Sequence[TensorLayout]], Copier
]


class ToyEngine:
    """Continuous batching, chunked prefill, windows, preemption of the youngest, aborts.

    Blocks of all groups come from one pool, and the last one freed is the next one handed out.
    """

    def __init__(
        self,
        settings: ToySettings,
        manager: OffloadingManager | None = None,
        clock: Clock | None = None,
        *,
        below: Below | None = None,
        make_copier: MakeCopier = make_copier,
    ) -> None:
        self.settings = settings
        self.below = below
        clock = clock or (below.clock if below else None)
        self.rng = random.Random(settings.seed)
        self.config = config = settings.config()
        groups = settings.groups
        block_bytes = [LAYERS * g.tokens_per_block * ITEM_BYTES for g in groups]
        self.manager = manager or build_manager(
            {
                "primary": {"num_chunks": settings.num_slots, "policy": "lru"},
                "filter": {"store_threshold": settings.store_threshold},
                **(below.settings if below else {}),
            },
            chunk_bytes=config.chunk_bytes(block_bytes),
            namespace="toy",
            clock=clock,
        )
        self.connector = OffloadingConnectorScheduler(self.manager, config, clock=clock)
        self.tensors = [
            [
                [np.full((settings.num_blocks, g.tokens_per_block), POISON, np.uint64)
                 for _ in range(LAYERS)]
                for g in groups
            ]
            for _ in range(settings.num_ranks)
        ]  # fmt: skip
        layouts = [TensorLayout(settings.num_blocks, 0) for _ in groups]
        self.transfers = [ManualTransfers() for _ in range(settings.num_ranks)]
        slots = self.manager.slots
        self.copiers = [
            FaultyCopier(
                make_copier(slots, config, rank, tensors, layouts), settings.failure_rate, self.rng
            )
            for rank, tensors in enumerate(self.tensors)
        ]
        self.workers = [
            OffloadingConnectorWorker(
                config,
                rank,
                copier,
                transfers=None if settings.with_threads else self.transfers[rank],
            )
            for rank, copier in enumerate(self.copiers)
        ]
        self.free = list(range(1, settings.num_blocks))
        self.owners = [0] * settings.num_blocks
        self.cached: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}
        self.waiting: list[ToyRequest] = []
        self.running: list[ToyRequest] = []
        self.finished: dict[str, ToyRequest] = {}
        self.aborted_while_loading: dict[str, ToyRequest] = {}
        self.outcomes: list[LoadOutcome] = []
        self.messages: list[StepMessage] = []
        self.num_preemptions = 0
        self.num_steps = 0
        self._step = self._new_step()

    def _new_step(self) -> ToyStep:
        return ToyStep({}, len(self.settings.groups))

    # -- requests

    def add(
        self, req_id: str, tokens: Sequence[int], num_new_tokens: int = 1, **hints: object
    ) -> ToyRequest:
        params = {"kvstrata": hints} if hints else None
        request = ToyRequest(
            req_id, list(tokens), num_new_tokens, self.settings.tokens_per_hash, params
        )
        self.connector.on_new_request(request)
        self.waiting.append(request)
        return request

    def abort(self, req_id: str) -> None:
        for queue in (self.waiting, self.running):
            for request in queue:
                if request.req_id == req_id:
                    queue.remove(request)
                    self._end(request)
                    return

    def _end(self, request: ToyRequest) -> None:
        is_loading = request.status is Status.LOADING
        request.status = Status.DONE
        tables = request.tables or [[] for _ in self.settings.groups]
        self.connector.request_finished(request, tables)
        if is_loading:
            self.aborted_while_loading[request.req_id] = request
        else:
            self._free(request)
        self.finished[request.req_id] = request

    # -- blocks

    def _free(self, request: ToyRequest) -> None:
        for table in request.tables:
            for block_id in reversed(table):
                self._release(block_id)
        request.tables = []

    def _release(self, block_id: int) -> None:
        if block_id != NULL:
            self.owners[block_id] -= 1
            if self.owners[block_id] == 0:
                self.free.append(block_id)

    def _take(self) -> int:
        block_id = self.free.pop()
        self.owners[block_id] = 1
        block_hash = self.hash_of.pop(block_id, None)
        if block_hash is not None:
            del self.cached[block_hash]
        return block_id

    def _allocate(self, request: ToyRequest, num_tokens: int, num_needed_from: int) -> bool:
        """Give blocks up to `num_tokens`; behind a window only those from what it needs on."""
        missing: list[tuple[int, int]] = []
        for g, group in enumerate(self.settings.groups):
            table = request.tables[g]
            first = first_needed_token(group, num_needed_from) // group.tokens_per_block
            last = -(-num_tokens // group.tokens_per_block)
            missing += [(g, NULL if i < first else 1) for i in range(len(table), last)]
        if sum(block for _, block in missing) > len(self.free):
            return False
        for g, block in missing:
            block_id = self._take() if block else NULL
            request.tables[g].append(block_id)
            if block_id != NULL:
                self._step.new_block_ids[g].append(block_id)
        return True

    def _leave_window_behind(self, request: ToyRequest) -> None:
        for g, group in enumerate(self.settings.groups):
            first = first_needed_token(group, request.num_computed_tokens)
            table = request.tables[g]
            for i in range(min(first // group.tokens_per_block, len(table))):
                self._release(table[i])
                table[i] = NULL

    def _local_blocks(self, request: ToyRequest) -> list[int]:
        blocks: list[int] = []
        if self.settings.with_local_cache:
            assert len(self.settings.groups) == 1
            per_block = self.settings.groups[0].tokens_per_block
            assert per_block == self.settings.tokens_per_hash
            for block_hash in request.block_hashes[: (request.num_tokens - 1) // per_block]:
                if block_hash not in self.cached:
                    break
                blocks.append(self.cached[block_hash])
        return blocks

    def _cache_blocks(self, request: ToyRequest) -> None:
        if self.settings.with_local_cache:
            per_block = self.settings.groups[0].tokens_per_block
            num_full = min(request.num_computed_tokens // per_block, len(request.block_hashes))
            for block_hash, block_id in zip(
                request.block_hashes[:num_full], request.tables[0], strict=False
            ):
                if block_hash not in self.cached and block_id not in self.hash_of:
                    self.cached[block_hash] = block_id
                    self.hash_of[block_id] = block_hash

    # -- one step

    def step(self) -> None:
        self.num_steps += 1
        budget = self._schedule_running(self.settings.tokens_per_step)
        if not self._step.preempted_req_ids:
            self._schedule_waiting(budget)
        step, self._step = self._step, self._new_step()
        requests = {r.req_id: r for r in self.running if r.req_id in step.num_scheduled_tokens}
        step.tables = {r.req_id: r.tables for r in requests.values()}
        message = self.connector.build_connector_meta(step)
        self.messages.append(message)
        self._before_writes(message)
        self._poison(step)
        for worker in self.workers:
            worker.start_loads(message)
        for req_id, num_tokens in step.num_scheduled_tokens.items():
            self._compute(requests[req_id], num_tokens)
        for worker in self.workers:
            worker.start_stores(message)
        self.collect()
        for req_id, num_tokens in step.num_scheduled_tokens.items():
            self._sample(requests[req_id], num_tokens)
        self.connector.check()
        if self.below is not None:
            self.below.next_step()

    def _before_writes(self, message: StepMessage) -> None:
        if not self.settings.with_fence:
            message = replace(message, flush_job_ids=())
        for worker in self.workers:
            worker.handle_preemptions(message)

    def _poison(self, step: ToyStep) -> None:
        for tensors in self.tensors:
            for layers, block_ids in zip(tensors, step.new_block_ids, strict=True):
                for layer in layers:
                    layer[block_ids] = POISON

    def collect(self) -> None:
        """Take in what the workers report."""
        outputs = [worker.take_output() for worker in self.workers]
        for outcome in self.connector.update_connector_output(outputs):
            self.outcomes.append(outcome)
            self._on_outcome(outcome)

    def _on_outcome(self, outcome: LoadOutcome) -> None:
        aborted = self.aborted_while_loading.pop(outcome.req_id, None)
        if aborted is not None:
            self._free(aborted)
            return
        (request,) = (r for r in self.waiting if r.req_id == outcome.req_id)
        assert request.status is Status.LOADING
        request.status = Status.LOADED
        request.num_computed_tokens = outcome.num_computed_tokens
        if outcome.num_failed_tokens and outcome.num_computed_tokens == 0:
            self._free(request)
            request.status = Status.WAITING
        else:
            self._cache_blocks(request)

    def _preempt(self, request: ToyRequest) -> None:
        self.num_preemptions += 1
        self._step.preempted_req_ids.append(request.req_id)
        self._free(request)
        request.num_computed_tokens = 0
        request.status = Status.WAITING
        self.waiting.insert(0, request)

    def _schedule_running(self, budget: int) -> int:
        for request in list(self.running):
            if request not in self.running:
                continue  # preempted in this step
            num_tokens = min(budget, request.num_tokens - request.num_computed_tokens)
            if num_tokens == 0:
                continue
            self._leave_window_behind(request)
            end = request.num_computed_tokens + num_tokens
            while not self._allocate(request, end, request.num_computed_tokens):
                victim = self.running.pop()
                self._preempt(victim)
                if victim is request:
                    break
            else:
                self._schedule(request, num_tokens)
                budget -= num_tokens
        return budget

    def _schedule(self, request: ToyRequest, num_tokens: int) -> None:
        self._step.num_scheduled_tokens[request.req_id] = num_tokens
        if not request.has_run:
            request.has_run = True
            self._step.new_req_ids.append(request.req_id)

    def _schedule_waiting(self, budget: int) -> None:
        for request in list(self.waiting):
            if budget == 0:
                return
            if request.status is Status.LOADING:
                continue
            if request.status is Status.WAITING:
                num_external = self._admit(request)
                if num_external is None:
                    continue
                if num_external:
                    request.status = Status.LOADING
                    continue
                if not request.tables:
                    return  # no blocks: nobody behind it is looked at
            num_tokens = min(budget, request.num_tokens - request.num_computed_tokens)
            end = request.num_computed_tokens + num_tokens
            self._leave_window_behind(request)
            if not self._allocate(request, end, request.num_computed_tokens):
                if request.status is Status.WAITING:
                    self._free(request)
                    request.num_computed_tokens = 0
                return
            self.connector.update_state_after_alloc(request, request.tables, 0)
            request.status = Status.RUNNING
            self.waiting.remove(request)
            self.running.append(request)
            self._schedule(request, num_tokens)
            budget -= num_tokens

    def _admit(self, request: ToyRequest) -> int | None:
        """Ask the connector; start a load if there is one. None: not in this step."""
        local = self._local_blocks(request)
        num_local = len(local) * self.settings.groups[0].tokens_per_block
        match = self.connector.get_num_new_matched_tokens(request, num_local)
        assert match.is_async == bool(match.num_tokens)
        if match.num_tokens is None:
            return None
        num_tokens = num_local + match.num_tokens
        assert num_tokens < request.num_tokens
        for block_id in local:
            if self.owners[block_id] == 0:
                self.free.remove(block_id)
            self.owners[block_id] += 1
        request.tables = [list(local), *([] for _ in self.settings.groups[1:])]
        if not self._allocate(request, num_tokens, num_tokens):
            self._free(request)
            return 0
        request.num_computed_tokens = num_local
        if match.num_tokens:
            self.connector.update_state_after_alloc(request, request.tables, match.num_tokens)
        return match.num_tokens

    def _salt(self, rank: int, group_idx: int, layer: int) -> int:
        if self.settings.is_replicated:
            rank = 0
        return (rank * 1009 + group_idx * 101 + layer) * 0x9E37_79B9_7F4A_7C15 % 2**64

    def _compute(self, request: ToyRequest, num_tokens: int) -> None:
        start = request.num_computed_tokens
        end = start + num_tokens
        request.num_tokens_computed += num_tokens
        for g, group in enumerate(self.settings.groups):
            table = np.array(request.tables[g])
            first = first_needed_token(group, start)
            for rank, tensors in enumerate(self.tensors):
                for layer, tensor in enumerate(tensors[g]):
                    salt = self._salt(rank, g, layer)
                    at = np.arange(first, end)
                    blocks, places = (
                        table[at // group.tokens_per_block],
                        at % group.tokens_per_block,
                    )
                    assert (blocks != NULL).all()
                    seen = tensor[blocks[: start - first], places[: start - first]]
                    assert (seen == request.kv(first, start, salt)).all(), (
                        f"{request.req_id} reads wrong bytes in group {g}, rank {rank}"
                    )
                    tensor[blocks[start - first :], places[start - first :]] = request.kv(
                        start, end, salt
                    )

    def _sample(self, request: ToyRequest, num_tokens: int) -> None:
        request.num_computed_tokens += num_tokens
        self._cache_blocks(request)
        if request.num_computed_tokens < request.num_tokens:
            return
        request.extend([request.chain[-1] % 50])
        if request.num_tokens == request.num_wanted:
            self.running.remove(request)
            self._end(request)

    # -- many steps

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running or self.aborted_while_loading)

    def run(self, num_steps_max: int = 2000) -> None:
        """Step until every request has ended and every job is over."""
        for _ in range(num_steps_max):
            if self.is_idle and not self.connector.has_pending_work():
                break
            if not self.running and self.settings.with_threads:
                for worker in self.workers:
                    worker.wait_for_results(5)
            self.step()
            for transfers in self.transfers:
                transfers.run_some(self.rng)
        else:
            raise AssertionError(f"not done after {num_steps_max} steps")

    def finish(self) -> None:
        """Run all copies and check that nothing is left behind."""
        self.run()
        stats = self.manager.get_stats()
        assert stats["num_pinned"] == stats["num_writing"] == 0
        mine = self.connector.get_stats()
        assert mine["open_blocks"] == mine["open_loads"] == mine["open_stores"] == 0
        assert mine["live_requests"] == mine["held_requests"] == 0
        assert sorted(self.free) == list(range(1, self.settings.num_blocks))
        self.verify_primary()

    def close(self) -> None:
        for worker in self.workers:
            assert not worker.shutdown()
        self.connector.shutdown()

    def resident(self, request: ToyRequest) -> list[tuple[int, int]]:
        """Return (group, chunk index) of the request's full chunks that can be loaded now."""
        ctx = ReqContext("verify")
        found = []
        for g, group in enumerate(self.settings.groups):
            for idx in range(request.num_tokens // group.tokens_per_chunk):
                states = self.manager.lookup_states([self.key(request, g, idx)], ctx)
                if states[0] is LookupResult.HIT:
                    found.append((g, idx))
        return found

    def key(self, request: ToyRequest, group_idx: int, idx: int) -> OffloadKey:
        per_chunk = self.settings.groups[group_idx].tokens_per_chunk
        last = (idx + 1) * per_chunk // self.settings.tokens_per_hash - 1
        return make_offload_key(request.block_hashes[last], group_idx)

    def verify_primary(self) -> None:
        """Check every byte that a load could read of every chunk of every finished request."""
        ctx = ReqContext("verify")
        for request in self.finished.values():
            for g, idx in self.resident(request):
                key = self.key(request, g, idx)
                (slot,) = self.manager.prepare_load([key], ctx).slots
                self._verify_chunk(request, g, idx, self.manager.slots[slot])
                self.manager.complete_load([key], ctx)

    def _verify_chunk(self, request: ToyRequest, g: int, idx: int, row: memoryview) -> None:
        group = self.settings.groups[g]
        start, end = idx * group.tokens_per_chunk, (idx + 1) * group.tokens_per_chunk
        first = max(start, first_needed_token(group, end - 1))
        for share in range(1 if self.settings.is_replicated else self.settings.num_ranks):
            share_bytes = len(row) // (
                1 if self.settings.is_replicated else self.settings.num_ranks
            )
            chunk = np.frombuffer(row, np.uint64, group.tokens_per_chunk * LAYERS,
                                  share * share_bytes)  # fmt: skip
            parts = chunk.reshape(group.blocks_per_chunk, LAYERS, group.tokens_per_block)
            for layer in range(LAYERS):
                seen = parts[:, layer].reshape(-1)[first - start :]
                assert (seen == request.kv(first, end, self._salt(share, g, layer))).all(), (
                    f"chunk {idx} of group {g} of {request.req_id} holds wrong bytes"
                )
