"""The engine's loop: what a step does, and where an engine calls the connector.

The calls are numbered as in `kvstrata.connector`: 4 to 8 are here, the others in `scheduler.py`.
"""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstrata.connector.config import GroupKind, KVGroup, SchedulerOffloadConfig
from kvstrata.connector.copier import make_copier
from kvstrata.connector.layout import TensorLayout
from kvstrata.connector.scheduler import OffloadingConnectorScheduler
from kvstrata.connector.transfers import Transfers
from kvstrata.connector.worker import OffloadingConnectorWorker
from kvstrata.core.manager import OffloadingManager
from kvstrata.core.namespace import NO_EXTRAS, HashExtras, Namespace
from kvstrata.engine.block_table import BlockTables, tokens_per_hash
from kvstrata.engine.model import NULL_BLOCK, ModelConfig, PagedKV, Transformer
from kvstrata.engine.request import GREEDY, Request, Sampling
from kvstrata.engine.sampling import sample
from kvstrata.engine.scheduler import DEFAULT_LIMITS, Scheduler, SchedulerLimits, StepPlan

LOAD_WAIT_S = 0.05
TIER_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Blocks of each KV group, how many of them are offloaded together, and limits of a step.

    Attributes:
        num_blocks: For each group, the null block included.
        blocks_per_chunk: For each group.
        limits: How much runs at once.
    """

    num_blocks: tuple[int, ...]
    blocks_per_chunk: tuple[int, ...]
    limits: SchedulerLimits = DEFAULT_LIMITS

    def offload_config(self, model: ModelConfig) -> SchedulerOffloadConfig:
        """Describe the engine's KV groups to the connector."""
        groups = zip(model.groups, self.blocks_per_chunk, self.num_blocks, strict=True)
        return SchedulerOffloadConfig(
            groups=tuple(
                KVGroup(
                    tokens_per_block=group.tokens_per_block,
                    blocks_per_chunk=span,
                    kind=GroupKind.FULL if group.window is None else GroupKind.WINDOW,
                    window_tokens=group.window,
                    pool_idx=index,
                )
                for index, (group, span, _) in enumerate(groups)
            ),
            tokens_per_hash=tokens_per_hash(model.groups),
            null_block_id=NULL_BLOCK,
            num_engine_tokens=min(
                (count - 1) * group.tokens_per_block
                for group, count in zip(model.groups, self.num_blocks, strict=True)
            ),
        )

    def chunk_bytes(self, model: ModelConfig) -> int:
        """Return the bytes of a slot, for whoever builds the manager."""
        block_bytes = [model.block_bytes(group) for group in model.groups]
        return self.offload_config(model).chunk_bytes(block_bytes)

    def namespace(self, model: ModelConfig, *, revision: str) -> Namespace:
        """Name what equal keys have in common, for whoever builds the manager.

        Args:
            model: Its shapes and KV groups.
            revision: Fingerprint of the weights.
        """
        groups = zip(model.groups, self.blocks_per_chunk, strict=True)
        return Namespace(
            model=model.name,
            revision=revision,
            dtype="float32",
            kv_dtype="float32",
            layout="block,layer,kv,token,head,channel",
            hash_algorithm="kvstrata-sha256",
            extra=tuple(
                (f"group{i}", f"{g.layers} {g.tokens_per_block} {g.window} x{span}")
                for i, (g, span) in enumerate(groups)
            ),
        )


class Engine:
    """Serves requests with a model, its own KV blocks and, where there is a manager, offloading."""

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        manager: OffloadingManager | None = None,
        *,
        transfers: Transfers | None = None,
    ) -> None:
        """Allocate blocks and connect to the manager, which the engine owns from now on.

        Args:
            model: The model.
            config: Sizes.
            manager: Made with this config's `chunk_bytes` and `namespace`. None: no offloading.
            transfers: What runs the copies; None: a thread.
        """
        self._model = model
        self.kv = PagedKV(model.config, config.num_blocks)
        self._tokens_per_hash = tokens_per_hash(model.config.groups)
        self.connector: OffloadingConnectorScheduler | None = None
        self.worker: OffloadingConnectorWorker | None = None
        if manager is not None:
            offload = config.offload_config(model.config)
            self.connector, self.worker = _connect(manager, offload, self.kv, transfers)
        self.tables = BlockTables(model.config.groups, config.num_blocks)
        self._scheduler = Scheduler(self.tables, config.limits, self.connector)
        self._requests: dict[str, Request] = {}
        self._numbers = itertools.count()

    def add_request(
        self,
        prompt: Sequence[int],
        sampling: Sampling = GREEDY,
        *,
        req_id: str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        extras: HashExtras = NO_EXTRAS,
    ) -> Request:
        """Queue a prompt. The request returned grows while the engine steps.

        Raises:
            ValueError: The prompt is empty or can't fit into the blocks, or the id is in use.
        """
        req_id = req_id or f"request-{next(self._numbers)}"
        if req_id in self._requests:
            raise ValueError(f"{req_id} is in use")
        request = Request(
            req_id,
            prompt,
            sampling,
            tokens_per_hash=self._tokens_per_hash,
            kv_transfer_params=kv_transfer_params,
            extras=extras,
        )
        self._scheduler.add(request)
        self._requests[req_id] = request
        return request

    def abort(self, req_id: str) -> None:
        """End a request early; harmless when there is none of this id."""
        request = self._requests.pop(req_id, None)
        if request:
            self._scheduler.abort(request)

    @property
    def has_requests(self) -> bool:
        """Whether any request is not over."""
        return self._scheduler.has_requests

    @property
    def has_work(self) -> bool:
        """Whether steps are needed: for requests, or for copies in flight to be settled."""
        pending = self.connector is not None and self.connector.has_pending_work()
        return self._scheduler.has_requests or pending

    def step(self) -> list[Request]:
        """Run one step; return the requests that it finished."""
        plan = self._scheduler.schedule()
        if self.connector is None or self.worker is None:
            return self._finish(plan, self._compute(plan))

        message = self.connector.build_connector_meta(plan)  # connector call 4
        self.worker.handle_preemptions(message)  # 5: from here on blocks may be written
        self.worker.start_loads(message)  # 6
        next_tokens = self._compute(plan)
        self.worker.start_stores(message)  # 7: this step's blocks are filled
        if not plan.runs and self._scheduler.is_loading:
            self.worker.wait_for_results(LOAD_WAIT_S)
        elif not plan.runs:
            time.sleep(TIER_POLL_S)  # stores end, or a tier brings what a request waits for
        over = self._finish(plan, next_tokens)
        for outcome in self.connector.update_connector_output([self.worker.take_output()]):  # 8
            self._scheduler.finish_load(outcome)
        return over

    def run(self) -> Iterator[Request]:
        """Step until nothing is left to do; yield requests as they finish."""
        while self.has_work:
            yield from self.step()

    def close(self) -> None:
        """Abort what runs, then end the connector and its manager."""
        for req_id in list(self._requests):
            self.abort(req_id)
        if self.connector and self.worker:
            self.worker.shutdown()
            self.connector.shutdown()

    def _compute(self, plan: StepPlan) -> dict[str, int]:
        """Run the model; return the next token of each request that has reached its end."""
        if not plan.runs:
            return {}
        logits = self._model.forward(plan.segments(), self.kv)
        next_tokens = {}
        for row, (request, count) in zip(logits, plan.runs.values(), strict=True):
            if request.num_computed_tokens + count == request.num_tokens:
                next_tokens[request.req_id] = sample(row, request.sampling, request.num_tokens)
                request.first_token_s = request.first_token_s or time.monotonic()
        return next_tokens

    def _finish(self, plan: StepPlan, next_tokens: Mapping[str, int]) -> list[Request]:
        over = self._scheduler.finish_step(plan, next_tokens)
        for request in over:
            del self._requests[request.req_id]
        return over


def _connect(
    manager: OffloadingManager,
    config: SchedulerOffloadConfig,
    kv: PagedKV,
    transfers: Transfers | None,
) -> tuple[OffloadingConnectorScheduler, OffloadingConnectorWorker]:
    """Make both halves of the connector; in one process here, joined by messages all the same."""
    copier = make_copier(
        manager.slots,
        config,
        rank=0,
        tensors=[[blocks] for blocks in kv.blocks],  # all layers of a group are one tensor here
        layouts=[TensorLayout(len(blocks), block_axis=0) for blocks in kv.blocks],
    )
    worker = OffloadingConnectorWorker(config, 0, copier, transfers=transfers)
    return OffloadingConnectorScheduler(manager, config), worker
