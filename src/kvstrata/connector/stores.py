"""The store side: which chunks are offered when, and the jobs that store them."""

from collections.abc import Sequence

from kvstrata.connector.chunks import (
    chunks_due,
    chunks_of_preempted,
    mark_offered,
    tail_chunks,
)
from kvstrata.connector.jobs import JobKind, JobTable, OpenJob
from kvstrata.connector.messages import CopyJob
from kvstrata.connector.protocols import StepOutput
from kvstrata.connector.requests import Chunk, RequestOffloadState
from kvstrata.core.manager import OffloadingManager


class Stores:
    """Offers chunks to the manager once their blocks are final.

    `early` are jobs on blocks that their request no longer owns; they go into the next message.
    """

    def __init__(self, manager: OffloadingManager, jobs: JobTable) -> None:
        self._manager = manager
        self._jobs = jobs
        self.early: list[CopyJob] = []

    def take_early(self) -> list[CopyJob]:
        """Return the jobs on blocks that were given up since the last call."""
        early, self.early = self.early, []
        return early

    def on_scheduled(
        self, state: RequestOffloadState, num_computed: int, step: StepOutput
    ) -> CopyJob | None:
        """Offer what is final once this step has computed up to `num_computed` tokens."""
        state.num_final = min(num_computed, state.num_hashed)
        with_tail = (
            state.config.match_tokens is not None
            and state.tail_offered == 0
            and num_computed >= state.request.num_prompt_tokens
        )
        if not with_tail and not any(
            state.num_final // group_state.group.tokens_per_chunk > group_state.num_offered
            for group_state in state.groups
        ):
            return None
        self._see_table(state, step.get_block_ids(state.request.req_id))
        state.extend_keys()
        # A chunk that found no room is offered again once a job has ended, not sooner.
        if state.num_settled_at_refusal == self._jobs.num_settled:
            return None
        chunks = chunks_due(state, state.num_final, step.unfilled_block_ids)
        if with_tail:
            chunks += tail_chunks(state, state.num_final)
        return self._offer(state, chunks)

    def on_preempted(self, state: RequestOffloadState) -> None:
        """Offer all final chunks once more: what was withheld so far is stored now or lost."""
        chunks = chunks_of_preempted(state) + tail_chunks(state, state.num_final)
        self._offer_early(state, chunks)

    def on_finished(self, state: RequestOffloadState, block_ids: Sequence[Sequence[int]]) -> None:
        """Offer what became final since the request was last scheduled."""
        self._see_table(state, block_ids)
        state.extend_keys()
        num_final = min(state.request.num_computed_tokens, state.num_hashed)
        chunks = chunks_due(state, num_final) + tail_chunks(state, num_final)
        self._offer_early(state, chunks)

    @staticmethod
    def _see_table(state: RequestOffloadState, block_ids: Sequence[Sequence[int]]) -> None:
        for group_state in state.groups:
            group_state.block_ids = tuple(block_ids[group_state.group_idx])

    def _offer_early(self, state: RequestOffloadState, chunks: list[Chunk]) -> None:
        job = self._offer(state, chunks)
        if job is not None:
            self.early.append(job)

    def _offer(self, state: RequestOffloadState, chunks: list[Chunk]) -> CopyJob | None:
        if not chunks:
            mark_offered(state.groups)
            return None
        output = self._manager.prepare_store([chunk.key for chunk in chunks], state.ctx)
        if output is None:
            state.num_settled_at_refusal = self._jobs.num_settled
            mark_offered(state.groups, chunks[0])
            return None
        state.num_settled_at_refusal = None
        slots = dict(zip(output.keys_to_store, output.store_spec.slots, strict=True))
        stored = [chunk for chunk in chunks if chunk.key in slots]
        if not stored:
            self._mark_all_offered(state, chunks)
            return None
        # What was left out behind the last one may have been for want of room: offer that again.
        rest = chunks[chunks.index(stored[-1]) + 1 :]
        mark_offered(state.groups, rest[0] if rest else None)
        if not rest:
            self._mark_all_offered(state, chunks)
        state.num_open_stores += 1
        return self._jobs.open(JobKind.STORE, state, stored, [slots[c.key] for c in stored])

    @staticmethod
    def _mark_all_offered(state: RequestOffloadState, chunks: Sequence[Chunk]) -> None:
        mark_offered(state.groups)
        if chunks[-1].end % state.config.tokens_per_match:
            state.tail_offered = chunks[-1].end

    def settle(self, job: OpenJob) -> None:
        """Publish what arrived on all ranks, and give back the slots of the rest."""
        self._manager.complete_store(job.keys, job.state.ctx, job.failed_keys)
        if not job.is_overdue:
            job.state.num_open_stores -= 1

    @staticmethod
    def give_up(job: OpenJob) -> None:
        """Wait no more for a store that takes too long. Its slots stay reserved until it ends."""
        job.state.num_open_stores -= 1
