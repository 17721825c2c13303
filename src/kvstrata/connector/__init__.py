"""Engine-neutral connector: what an engine calls, and when.

Two objects share nothing but messages, so that they may live in different processes:
`OffloadingConnectorScheduler` beside the engine's scheduler, one `OffloadingConnectorWorker` per
rank beside the tensors. To set up:

    config = SchedulerOffloadConfig(groups=(KVGroup(tokens_per_block=16),), tokens_per_hash=16)
    manager = build_manager(..., chunk_bytes=config.chunk_bytes([block_bytes]), namespace=...)
    scheduler = OffloadingConnectorScheduler(manager, config)
    layouts = [TensorLayout(num_blocks, block_axis=0)]
    copier = make_copier(manager.slots, config, 0, [[layer_0, layer_1]], layouts)
    worker = OffloadingConnectorWorker(config, 0, copier)

An engine then makes these calls, in this order.

Scheduler side, for each request and step:

 1. `scheduler.on_new_request(request)` once, when the request enters. `request` is an
    `EngineRequest`; the connector keeps it.
 2. `scheduler.get_num_new_matched_tokens(request, num_local_tokens) -> Match` whenever a waiting
    request with no blocks is considered: at first, on a retry, after a preemption.
    `num_local_tokens` are those that the engine's own prefix cache serves, a multiple of every
    group's `tokens_per_block`. The answer pins nothing and may be thrown away.
    `Match(None, False)`: skip this request in this step and go on with others.
    `Match(0, False)`: nothing to load; compute the rest.
    `Match(k, True)`: allocate blocks for the local and the k tokens (at least), then 3. Local and
    k tokens together leave at least one token to compute, but need not be a multiple of
    `tokens_per_block`: after a full hit only the last token is computed again, in a block that was
    loaded.
 3. `scheduler.update_state_after_alloc(request, block_ids, num_external_tokens)` right after each
    allocation for a waiting request that worked, in the same step as 2, also with 0 external
    tokens. `block_ids[g][i]` is the request's whole table in group g. With k > 0 the load starts
    with this step's message; the engine keeps the request out of the batch and its blocks away
    from everybody until the `LoadOutcome` of 8, even when the request is aborted.
 4. `scheduler.build_connector_meta(step_output) -> StepMessage` exactly once a step, after all
    scheduling, also on a step that computes nothing (a load may be all there is to do). Counts of
    computed tokens still exclude this step's (see `EngineRequest`).

Worker side, on every rank, with that message, also when there is nothing to compute:

 5. `worker.handle_preemptions(message)` before anything of this step writes a block (zeroing and
    copy-on-write included). When it returns, no transfer reads a block that this step may
    overwrite. It waits for copies, the only call that does: the blocks were given away already.
 6. `worker.start_loads(message)` before the forward pass. Returns at once.
 7. `worker.start_stores(message)` after the forward pass was run (CPU) or enqueued (CUDA). Returns
    at once. Then `worker.take_output() -> WorkerOutput`: what ended since the last call.

Scheduler side again:

 8. `scheduler.update_connector_output(outputs) -> Sequence[LoadOutcome]` with the outputs of all
    ranks, in any grouping: a job counts as over when every rank has reported it. One outcome
    follows for each load. Where `num_failed_tokens` is positive, set the request's computed tokens
    to `num_computed_tokens` (or to any smaller multiple of `tokens_per_block`) and compute the
    rest; the connector does not try to load that request again. Otherwise the request can run: its
    computed tokens are `num_computed_tokens`, and its full blocks may enter the engine's prefix
    cache now, and not before.
 9. `scheduler.request_finished(request, block_ids)` once, for whatever reason the request ends,
    also if it never ran, before its blocks are freed (`block_ids` as in 3; empty tables if it has
    none). They may be handed out at once: stores that still read them are named in the message of
    the step that reuses them. Only a load in flight (3) keeps its blocks.

While `scheduler.has_pending_work()` is True the engine makes steps, empty ones if need be; it may
wait in `worker.wait_for_results(timeout_s)` before an empty one. At the end `worker.shutdown()` on
every rank, then `scheduler.shutdown()`, which shuts the manager down too.

A block handed out by the engine in any way goes through 3 or `StepOutput.new_block_ids`: the fence
has no other source.
"""

from kvstrata.connector.config import GroupKind, KVGroup, SchedulerOffloadConfig
from kvstrata.connector.copier import Copier, HostCopier, block_bytes_of, make_copier
from kvstrata.connector.layout import TensorLayout
from kvstrata.connector.messages import (
    BlockCopies,
    CopyJob,
    CopyResult,
    LoadOutcome,
    Match,
    StepMessage,
    WorkerOutput,
)
from kvstrata.connector.protocols import EngineRequest, StepOutput
from kvstrata.connector.records import RequestRecord
from kvstrata.connector.scheduler import OffloadingConnectorScheduler
from kvstrata.connector.worker import OffloadingConnectorWorker

__all__ = [
    "BlockCopies",
    "Copier",
    "CopyJob",
    "CopyResult",
    "EngineRequest",
    "GroupKind",
    "HostCopier",
    "KVGroup",
    "LoadOutcome",
    "Match",
    "OffloadingConnectorScheduler",
    "OffloadingConnectorWorker",
    "RequestRecord",
    "SchedulerOffloadConfig",
    "StepMessage",
    "StepOutput",
    "TensorLayout",
    "WorkerOutput",
    "block_bytes_of",
    "make_copier",
]
