"""`KVStrataConnector`: vLLM's out-of-tree KV connector on top of `kvstrata.connector`.

Loaded with `{"kv_connector": "KVStrataConnector", "kv_connector_module_path":
"kvstrata.integrations.vllm", "kv_role": "kv_both", "kv_connector_extra_config": {...}}`. vLLM makes
one object beside its scheduler and one beside the tensors of each rank; they share nothing but what
vLLM carries between them. It translates names and decides nothing.
"""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from typing_extensions import override

try:
    import vllm
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
    from vllm.platforms import current_platform
    from vllm.v1.core.kv_cache_utils import get_none_hash_seed
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    from kvstrata.integrations.vllm_metrics import StatsReporter, VllmPromMetrics, VllmStats
    from kvstrata.integrations.vllm_views import VllmRequest, VllmStep, translated
except ImportError as error:
    raise ImportError(f"kvstrata needs vLLM 0.32; this one lacks something: {error}") from error

from kvstrata.build import build_manager
from kvstrata.connector import (
    Copier,
    OffloadingConnectorScheduler,
    OffloadingConnectorWorker,
    StepMessage,
    TensorLayout,
    WorkerOutput,
    block_bytes_of,
    make_copier,
)
from kvstrata.connector.transfers import TransferThread
from kvstrata.core.errors import ConfigError
from kvstrata.core.events import PRIMARY_MEDIUM
from kvstrata.core.memory import SlotView
from kvstrata.integrations.vllm_cpus import spare_cpus
from kvstrata.integrations.vllm_plan import (
    TESTED_VERSIONS,
    VllmPlan,
    make_namespace,
    make_plan,
    unwise_settings,
)
from kvstrata.primary.region import HostRegion, RegionHandle

logger = logging.getLogger("vllm.kvstrata")

# To write down what only host memory holds; vLLM may allow more, and kills what takes longer.
SHUTDOWN_S_MIN: Final = 10.0

# What vLLM calls the place that a tier's type keeps chunks in.
HIT_SOURCES: Final = {
    "memory": CacheHitSource.HOST,
    "fs": CacheHitSource.DISK,
    "p2p": CacheHitSource.P2P,
}


@dataclass(frozen=True)
class VllmStepMessage(KVConnectorMetadata):  # type: ignore[misc]
    """A step's message, and where the workers find the slots."""

    message: StepMessage
    region: RegionHandle


@dataclass(frozen=True)
class VllmWorkerOutputs(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What ranks report back."""

    outputs: tuple[WorkerOutput, ...]

    @override
    def aggregate(self, other: KVConnectorWorkerMetadata) -> "VllmWorkerOutputs":
        return VllmWorkerOutputs(self.outputs + other.outputs)


class _SchedulerSide:
    """What the connector holds beside vLLM's scheduler."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, plan: VllmPlan) -> None:  # noqa: ANN401
        namespace = make_namespace(
            vllm_config,
            plan,
            version=vllm.__version__,
            hash_seed=get_none_hash_seed(),
            device=current_platform.get_device_name(),
            kv_layout=kv_cache_config.kv_cache_layout,
        )
        manager = build_manager(
            plan.config, chunk_bytes=plan.chunk_bytes, namespace=namespace, shared=plan.shared
        )
        assert isinstance(manager.slots, HostRegion)
        self.region = manager.slots
        self.scheduler = OffloadingConnectorScheduler(manager, plan.offload)
        self.requests: dict[str, VllmRequest] = {}
        self.reporter = StatsReporter(self.scheduler, self.requests)
        self.admitted: set[str] = set()
        self.hit_sources = {tier.name: HIT_SOURCES.get(tier.type) for tier in plan.config.tiers}
        self.shutdown_s = max(SHUTDOWN_S_MIN, float(vllm_config.shutdown_timeout))
        logger.info(
            "kvstrata: %d slots of %d bytes, tiers %s, namespace %s",
            len(self.region), plan.chunk_bytes, [tier.name for tier in plan.config.tiers],
            namespace.fingerprint()[:16],
        )  # fmt: skip


class _WorkerSide:
    """What the connector holds beside the tensors of one rank."""

    def __init__(self, kv_caches: Mapping[str, Any], rank: int) -> None:
        self.kv_caches = kv_caches
        self.rank = rank
        self.region: HostRegion | None = None
        self.spare_cpus: Collection[int] = ()
        self.worker: OffloadingConnectorWorker | None = None
        self.output: WorkerOutput | None = None


class KVStrataConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Offloads vLLM's KV blocks and loads them back, asynchronously.

    Tests override `make_worker`; nothing else is meant to be.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:  # noqa: ANN401
        """Check that this vLLM is supported, and build the manager on the scheduler's side.

        Raises:
            ConfigError: Something is not supported, or a setting is wrong.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        self._plan = make_plan(vllm_config, kv_cache_config)
        self._num_blocks = kv_cache_config.num_blocks
        self._scheduler_side: _SchedulerSide | None = None
        self._worker_side: _WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            _warn(vllm_config, self._plan)
            self._scheduler_side = _SchedulerSide(vllm_config, kv_cache_config, self._plan)

    @property
    def scheduler_side(self) -> _SchedulerSide:
        """The scheduler's half; only on the object that vLLM made for its scheduler."""
        assert self._scheduler_side is not None
        return self._scheduler_side

    @property
    def worker_side(self) -> _WorkerSide:
        """The worker's half; only on the object of a worker, once it has its tensors."""
        assert self._worker_side is not None
        return self._worker_side

    # Worker side, in the order of a step.

    @override
    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        side = self._worker_side = _WorkerSide(kv_caches, get_tensor_model_parallel_rank())
        # Refused now where need be: the slots, and with them the copier, come with the first step.
        found = block_bytes_of(self._plan.offload, *self._described(side))
        for idx, (size, expected) in enumerate(zip(found, self._plan.block_bytes, strict=True)):
            if size > expected:
                raise ConfigError(
                    f"kv_cache_groups[{idx}]",
                    f"its tensors have {size} bytes a block; vLLM's configuration says {expected}",
                )

    def _described(self, side: _WorkerSide) -> tuple[list[list[Any]], list[TensorLayout]]:
        """Return the tensors of each group and how they hold blocks.

        Whatever the order in memory, which vLLM calls the layout, axis 0 of a tensor counts blocks:
        its shape is always [blocks, heads, tokens, content].
        """
        tensors = [[side.kv_caches[name] for name in names] for names in self._plan.layer_names]
        return tensors, [TensorLayout(self._num_blocks, block_axis=0)] * len(tensors)

    def make_worker(self, slots: SlotView) -> OffloadingConnectorWorker:
        """Make what copies between this rank's tensors and the slots.

        Raises:
            ConfigError: The tensors are not as expected.
        """
        side = self.worker_side
        copier = self.make_copier(slots)
        cpus = side.spare_cpus if current_platform.is_cpu() else None
        name = f"kvstrata-transfer-{side.rank}"
        transfers = TransferThread(name, cpus, num_threads=copier.num_threads)
        return OffloadingConnectorWorker(self._plan.offload, side.rank, copier, transfers=transfers)

    def make_copier(self, slots: SlotView) -> Copier:
        """Describe this rank's tensors to a copier."""
        side = self.worker_side
        return make_copier(slots, self._plan.offload, side.rank, *self._described(side))

    def _worker_for(self, metadata: VllmStepMessage) -> OffloadingConnectorWorker:
        side = self.worker_side
        if side.worker is None:
            side.region = HostRegion.attach(metadata.region)
            side.spare_cpus = spare_cpus(metadata.region.pid)
            side.worker = self.make_worker(side.region)
        return side.worker

    @override
    def handle_preemptions(self, kv_connector_metadata: VllmStepMessage) -> None:
        worker = self._worker_for(kv_connector_metadata)
        worker.handle_preemptions(kv_connector_metadata.message)

    @override
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        self._worker_for(metadata).start_loads(metadata.message)

    @override
    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    @override
    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return

    @override
    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        self._worker_for(metadata).start_stores(metadata.message)

    @override
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        side = self.worker_side
        assert side.worker is not None
        side.output = side.worker.take_output()
        failed = set(side.output.failed_req_ids) if len(self._plan.offload.groups) > 1 else set()
        return KVConnectorTransferResults(
            finished_recving=set(side.output.loaded_req_ids), failed_recving=failed
        )

    @override
    def get_block_ids_with_load_errors(self) -> set[int]:
        # With several groups vLLM takes failures by request only.
        output = self.worker_side.output
        if output is None or len(self._plan.offload.groups) > 1:
            return set()
        return {block_id for block_ids in output.failed_block_ids for block_id in block_ids}

    @override
    def build_connector_worker_meta(self) -> VllmWorkerOutputs | None:
        output, self.worker_side.output = self.worker_side.output, None
        return VllmWorkerOutputs((output,)) if output is not None and output.results else None

    # Scheduler side.

    @property
    @override
    def requires_kv_delivery(self) -> bool:
        return False  # a store that is lost is a miss

    @override
    def on_new_request(self, request: Any) -> None:
        side = self.scheduler_side
        wrapped = side.requests[request.request_id] = VllmRequest(request)
        side.scheduler.on_new_request(wrapped)

    @override
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if request.skip_reading_prefix_cache:
            return 0, False
        side = self.scheduler_side
        wrapped = side.requests[request.request_id]
        match = side.scheduler.get_num_new_matched_tokens(wrapped, num_computed_tokens)
        return match.num_tokens, match.is_async

    @override
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        side = self.scheduler_side
        wrapped = side.requests[request.request_id]
        side.admitted.add(request.request_id)
        side.scheduler.update_state_after_alloc(
            wrapped, blocks.get_block_ids(), num_external_tokens
        )

    @override
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        side = self.scheduler_side
        sources: dict[CacheHitSource, int] = {}
        served = side.scheduler.served_tokens(side.requests[request.request_id])
        for medium, num_tokens in served.items():
            source = side.hit_sources.get(medium) or CacheHitSource.EXTERNAL_UNSPECIFIED
            source = CacheHitSource.HOST if medium == PRIMARY_MEDIUM else source
            sources[source] = sources.get(source, 0) + num_tokens
        return sources

    @override
    def build_connector_meta(self, scheduler_output: Any) -> VllmStepMessage:
        side = self.scheduler_side
        step = VllmStep(scheduler_output, len(self._plan.offload.groups), side.admitted)
        side.admitted.clear()
        return VllmStepMessage(side.scheduler.build_connector_meta(step), side.region.handle)

    @override
    def update_connector_output(self, connector_output: Any) -> None:
        reported: VllmWorkerOutputs | None = connector_output.kv_connector_worker_meta
        # vLLM learns how loads ended from the workers themselves.
        self.scheduler_side.scheduler.update_connector_output(reported.outputs if reported else ())

    @override
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @override
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        side = self.scheduler_side
        side.scheduler.request_finished(side.requests.pop(request.request_id), block_ids)
        return False, None

    @override
    def has_pending_push_work(self) -> bool:
        return self.scheduler_side.scheduler.has_pending_work()

    @override
    def reset_cache(self) -> bool:
        self.scheduler_side.scheduler.reset_cache()
        return True

    @override
    def take_events(self) -> Iterable[KVCacheEvent]:
        events = self.scheduler_side.scheduler.take_events()
        return [told for event in events for told in translated(event)]

    # Both sides.

    @override
    def get_kv_connector_stats(self) -> VllmStats | None:
        return None if self._scheduler_side is None else self._scheduler_side.reporter.take()

    @classmethod
    @override
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> VllmStats:
        return VllmStats(data=data or {})

    @classmethod
    @override
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> VllmPromMetrics:
        return VllmPromMetrics(*args, **kwargs)

    @override
    def shutdown(self) -> None:
        worker_side, scheduler_side = self._worker_side, self._scheduler_side
        if worker_side is not None and worker_side.worker is not None:
            stuck = worker_side.worker.shutdown()
            if stuck:
                logger.warning("kvstrata: %d copies did not end in time", len(stuck))
            elif worker_side.region is not None:
                worker_side.region.close()
            worker_side.worker = worker_side.region = None
        if scheduler_side is not None:
            report = scheduler_side.scheduler.shutdown(scheduler_side.shutdown_s)
            logger.info("kvstrata: shut down, %s", report)


def _warn(vllm_config: Any, plan: VllmPlan) -> None:  # noqa: ANN401
    if not vllm.__version__.startswith(TESTED_VERSIONS):
        logger.warning("kvstrata is tested with vLLM 0.32; this is %s", vllm.__version__)
    for text in unwise_settings(vllm_config, plan.config):
        logger.warning("kvstrata: %s", text)
