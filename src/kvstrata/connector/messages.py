"""What goes between the scheduler side and the workers: jobs down, results up; all picklable."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstrata.core.keys import JobId


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Blocks of one KV group and their places in slots; all three sequences are equally long.

    Engine block `block_ids[i]` belongs at place `parts[i]` (0 to blocks_per_chunk - 1) of slot
    `slots[i]`; the places of a slot follow one another. A negative slot stands for a chunk that is
    gone: it fails. A store fills the places of its slots that are not named with zeros.
    """

    group_idx: int
    block_ids: Sequence[int]
    slots: Sequence[int]
    parts: Sequence[int]


@dataclass(frozen=True, slots=True)
class CopyJob:
    """One asynchronous copy between engine blocks and slots, for one request.

    It ends in exactly one `CopyResult` per rank. No slot occurs twice as a chunk.
    """

    job_id: JobId
    req_id: str
    copies: Sequence[BlockCopies]


@dataclass(frozen=True, slots=True)
class StepMessage:
    """What the workers do in one step, in this order.

    Attributes:
        step: Number of the step, counting up from 1.
        early_stores: Start at once: they read blocks that this step may overwrite (a preempted or
            finished request's), filled by steps before this one.
        flush_job_ids: Jobs, early stores among them, that have to be over before the step writes
            any block or any load starts. Ids that are over already are among them at times.
        loads: Slots to blocks. Start before the forward pass; nothing in this step reads the
            blocks.
        stores: Blocks to slots. Start once this step's forward pass has filled the blocks.
    """

    step: int
    early_stores: Sequence[CopyJob] = ()
    flush_job_ids: Sequence[JobId] = ()
    loads: Sequence[CopyJob] = ()
    stores: Sequence[CopyJob] = ()


@dataclass(frozen=True, slots=True)
class CopyResult:
    """How a job ended on one rank: `failed_slots` did not arrive; empty means that all did."""

    job_id: JobId
    failed_slots: frozenset[int] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """Results of one rank since its last output.

    Attributes:
        rank: The rank that reports, 0 to num_ranks - 1.
        results: One per job that ended on this rank.
        loaded_req_ids: Requests whose load is among them, failed or not, each once per load: for
            engines that count ranks themselves.
        failed_req_ids: Those of `loaded_req_ids` that lack a chunk.
        failed_block_ids: Engine blocks that a load should have filled and did not, per group.
    """

    rank: int
    results: Sequence[CopyResult] = ()
    loaded_req_ids: Sequence[str] = ()
    failed_req_ids: Sequence[str] = ()
    failed_block_ids: Sequence[Sequence[int]] = ()


class Match(NamedTuple):
    """How many more tokens of a request can come from offload.

    Attributes:
        num_tokens: Tokens beyond those the engine has; None: ask again on a later step. At least
            one token of the request is always left for the engine to compute.
        is_async: The load runs beside the steps; the request may not run before its `LoadOutcome`
            is there. True exactly when `num_tokens` is positive.
    """

    num_tokens: int | None
    is_async: bool


class LoadOutcome(NamedTuple):
    """How a load ended, on all ranks together.

    Attributes:
        req_id: The request; it may be finished by now.
        num_computed_tokens: Tokens from the start of the request whose blocks hold valid content,
            in every group; a multiple of every group's `tokens_per_block`, unless all arrived.
            What lies behind has to be computed, its blocks hold anything.
        num_failed_tokens: Tokens promised that are not valid; 0 when all arrived.
    """

    req_id: str
    num_computed_tokens: int
    num_failed_tokens: int
