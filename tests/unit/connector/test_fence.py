"""Which open jobs use which blocks, against a plain model."""

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.connector.fence import BlockFence
from kvstrata.core.keys import JobId

jobs = st.integers(0, 3).map(JobId)
blocks = st.sets(st.integers(0, 4))


@given(st.lists(st.tuples(jobs, blocks | st.none())), blocks)
def test_the_fence_names_exactly_the_open_jobs_on_the_blocks(
    actions: list[tuple[JobId, set[int] | None]], asked: set[int]
) -> None:
    fence = BlockFence()
    model: dict[JobId, set[int]] = {}
    for job_id, used in actions:
        if used is None:
            fence.remove(job_id)
            model.pop(job_id, None)
        elif job_id not in model:
            fence.add(job_id, used)
            model[job_id] = used
        fence.check()
        assert fence.jobs_on(asked) == {j for j, b in model.items() if b & asked}
        assert fence.num_blocks == len(set().union(*model.values()))
