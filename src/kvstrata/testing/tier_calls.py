"""Drive a secondary tier and wait, within bounds, for what it does by itself."""

import threading
from collections.abc import Callable, Mapping, Sequence

from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.core.results import JobResult, LoadJob, LookupResult, StoreJob
from kvstrata.core.tier import SecondaryTierManager
from kvstrata.testing.chunks import numbered_key

A, B, C, D, E = (numbered_key(i) for i in range(5))
IDLE_STEP = ScheduleEndContext((), ())
PATIENCE_S = 30.0
"""How long a call or a copy may take before it counts as stuck."""

_POLL_S = 0.002
NUM_POLLS_MAX = int(PATIENCE_S / _POLL_S)


def pause() -> None:
    """Let other threads work for a moment."""
    threading.Event().wait(_POLL_S)


def wait_for(tier: SecondaryTierManager, *job_ids: int) -> dict[int, JobResult]:
    """Poll, ending a step each time, until these jobs have ended; fail if others do as well."""
    results: dict[int, JobResult] = {}
    for _ in range(NUM_POLLS_MAX):
        tier.on_schedule_end(IDLE_STEP)
        for result in tier.get_finished_jobs():
            assert result.job_id in job_ids, f"{result} is for no job that was waited for"
            assert result.job_id not in results, f"job {result.job_id} ended twice"
            results[result.job_id] = result
        if len(results) == len(job_ids):
            return results
        pause()
    raise AssertionError(f"no result for jobs {set(job_ids) - set(results)}")


def submit_store(
    tier: SecondaryTierManager,
    job_id: int,
    chunks: Mapping[OffloadKey, int],
    expires_at_s: Sequence[float] | None = None,
    ctx: ReqContext | None = None,
) -> None:
    """Submit a job that stores each key from its slot."""
    keys, slots = tuple(chunks), tuple(chunks.values())
    tier.submit_store(StoreJob(JobId(job_id), keys, slots, ctx, expires_at_s=expires_at_s))


def submit_load(
    tier: SecondaryTierManager,
    job_id: int,
    chunks: Mapping[OffloadKey, int],
    ctx: ReqContext | None = None,
) -> None:
    """Submit a job that loads each key into its slot."""
    tier.submit_load(LoadJob(JobId(job_id), tuple(chunks), tuple(chunks.values()), ctx))


def store(
    tier: SecondaryTierManager,
    job_id: int,
    chunks: Mapping[OffloadKey, int],
    expires_at_s: Sequence[float] | None = None,
) -> JobResult:
    """Store each key from its slot and wait for the result."""
    submit_store(tier, job_id, chunks, expires_at_s)
    return wait_for(tier, job_id)[job_id]


def load(tier: SecondaryTierManager, job_id: int, chunks: Mapping[OffloadKey, int]) -> JobResult:
    """Load each key into its slot and wait for the result."""
    submit_load(tier, job_id, chunks)
    return wait_for(tier, job_id)[job_id]


def look_up(tier: SecondaryTierManager, key: OffloadKey) -> LookupResult:
    """Ask step by step until the tier knows."""
    ctx = ReqContext("lookup")
    for _ in range(NUM_POLLS_MAX):
        answer = tier.lookup(key, ctx)
        if answer in {LookupResult.HIT, LookupResult.MISS}:
            return answer
        tier.on_schedule_end(IDLE_STEP)
        pause()
    raise AssertionError("the tier never found out")


def returns(call: Callable[[], object]) -> bool:
    """Say whether the call comes back although the backend does not answer."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return not thread.is_alive()
