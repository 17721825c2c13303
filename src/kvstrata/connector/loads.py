"""The load side: what can be loaded for a request, the job that does it, and how it ended."""

from collections.abc import Mapping, Sequence

from kvstrata.connector.chunks import chunks_to_load, valid_tokens
from kvstrata.connector.config import GroupKind, SchedulerOffloadConfig
from kvstrata.connector.jobs import JobKind, JobTable, OpenJob
from kvstrata.connector.matching import PrefixMatcher
from kvstrata.connector.messages import CopyJob, LoadOutcome
from kvstrata.connector.requests import Chunk, FoundPrefix, RequestOffloadState
from kvstrata.core.clock import Clock
from kvstrata.core.keys import OffloadKey
from kvstrata.core.manager import OffloadingManager
from kvstrata.core.request import ReqContext
from kvstrata.core.results import LookupResult


class Loads:
    """Finds, starts and ends loads. `started` are those that go into the next message."""

    def __init__(
        self,
        manager: OffloadingManager,
        config: SchedulerOffloadConfig,
        jobs: JobTable,
        clock: Clock,
    ) -> None:
        self._manager = manager
        self._config = config
        self._jobs = jobs
        self._clock = clock
        self._matcher = PrefixMatcher(manager, config)
        self.started: list[CopyJob] = []
        self.num_failed_tokens = 0

    def find(self, state: RequestOffloadState, num_local: int) -> FoundPrefix | None:
        """Return what can be loaded beyond the engine's own tokens; None: ask again later."""
        state.extend_keys()
        keys: list[Sequence[OffloadKey]] = [()] * len(self._config.groups)
        for group_state in state.groups:
            keys[group_state.group_idx] = group_state.keys
        num_tokens = state.request.num_tokens
        end = self._matcher.find(keys, state.ctx, num_local, num_tokens)
        if end is None:
            return None
        tail = self._find_tail(state, max(end, num_local))
        if tail is None:
            return None
        end = max(end, min(tail, num_tokens - 1))
        return FoundPrefix(num_local, end, tail)

    def _find_tail(self, state: RequestOffloadState, start: int) -> int | None:
        """Return the end of the longest kept tail in the chunk where `start` lies, or 0."""
        match_tokens, per_match = self._config.match_tokens, self._config.tokens_per_match
        if match_tokens is None or start >= state.request.num_tokens - 1:
            return 0
        last = min(state.num_hashed, start // per_match * per_match + per_match - 1)
        tails = (
            (end, [state.key_at(end, group_state.group_idx) for group_state in state.groups])
            for end in range(last // match_tokens * match_tokens, start, -match_tokens)
        )
        return self._matcher.find_tail(tails, state.ctx)

    def start(self, state: RequestOffloadState, found: FoundPrefix) -> None:
        """Start a load of what was found."""
        chunks = chunks_to_load(state, found)
        keys = [chunk.key for chunk in chunks]
        slots = self._pin(keys, state.ctx)
        media = self._manager.media_of(keys, state.ctx)
        job = self._jobs.open(JobKind.LOAD, state, chunks, slots, found=found, media=media)
        self.started.append(job)
        state.load_job_id = job.job_id
        state.promised_tokens = split_tokens(self._config, found, found.end, chunks, media)

    def _pin(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> Sequence[int]:
        """Return the chunks' slots, and distinct negative numbers for those that are gone."""
        # Found in this step, and still a chunk may have expired since.
        states = self._manager.lookup_states(keys, ctx)
        here = [k for k, at in zip(keys, states, strict=True) if at is LookupResult.HIT]
        slots = self._manager.prepare_load(here, ctx).slots
        if len(here) == len(keys):
            return slots
        slot_of = dict(zip(here, slots, strict=True))
        return [slot_of.get(key, -1 - i) for i, key in enumerate(keys)]

    def take_started(self) -> list[CopyJob]:
        """Return the jobs started since the last call."""
        started, self.started = self.started, []
        return started

    def settle(self, job: OpenJob) -> LoadOutcome | None:
        """Unpin what a load that is over had pinned; return its outcome if it is not told yet."""
        self._manager.complete_load(job.keys, job.state.ctx, job.failed_keys & set(job.keys))
        return None if job.is_overdue else self._outcome(job)

    def give_up(self, job: OpenJob) -> LoadOutcome:
        """Return the outcome of a load that takes too long; its chunks stay pinned till it ends."""
        return self._outcome(job)

    def _outcome(self, job: OpenJob) -> LoadOutcome:
        state, found = job.state, job.found
        assert found is not None
        failed = {c.key for c in job.chunks} if job.is_overdue else job.failed_keys
        end = valid_tokens(self._config, found, job.chunks, failed)
        state.record.load_s += self._clock.now_s() - job.started_s
        state.record.add_loaded(split_tokens(self._config, found, end, job.chunks, job.media))
        state.load_job_id = None
        if end < found.end:
            state.load_failed = True
            self.num_failed_tokens += found.end - end
        return LoadOutcome(state.request.req_id, end, found.end - end)


def split_tokens(
    config: SchedulerOffloadConfig,
    found: FoundPrefix,
    end: int,
    chunks: Sequence[Chunk],
    media: Sequence[str],
) -> Mapping[str, int]:
    """Return the loaded tokens up to `end` by medium: each token as its chunk in one group.

    A whole-prefix group where there is one; what a window group leaves out counts for the medium of
    the first chunk it loads.
    """
    group_idx = min(
        (chunk.group_idx for chunk in chunks),
        key=lambda idx: (config.groups[idx].kind is not GroupKind.FULL, idx),
        default=0,
    )
    tokens: dict[str, int] = {}
    at = found.num_local
    for chunk, medium in zip(chunks, media, strict=True):
        if chunk.group_idx == group_idx and at < end:
            num_tokens = min(chunk.end, end) - at
            tokens[medium] = tokens.get(medium, 0) + num_tokens
            at += num_tokens
    return tokens
