"""Uses of chunks that are not tracked."""

from kvstrata.policies.use_counts import UseCounts
from kvstrata.testing.chunks import numbered_key


def test_a_chunk_that_left_is_counted_on_from_where_it_was() -> None:
    counts = UseCounts(100, uses_max=10)
    keys = [numbered_key(i) for i in range(5)]
    counts.set(keys[:2], 4)
    counts.set(keys[2:4], 1)
    assert list(counts.runs(keys)) == [(0, 2, 5), (2, 4, 2), (4, 5, 1)]


def test_uses_are_counted_up_to_a_limit() -> None:
    counts = UseCounts(100, uses_max=10)
    counts.set([numbered_key(1)], 10)
    assert list(counts.runs([numbered_key(1)])) == [(0, 1, 10)]


def test_old_chunks_give_way_and_memory_stays_what_it_was() -> None:
    counts = UseCounts(16, uses_max=10)
    counts.set([numbered_key(0)], 5)
    counts.set([numbered_key(i) for i in range(1, 20_000)], 1)
    assert list(counts.runs([numbered_key(0)])) == [(0, 1, 1)]


def test_clear_forgets_everything() -> None:
    counts = UseCounts(16, uses_max=10)
    counts.set([numbered_key(0)], 5)
    counts.clear()
    assert list(counts.runs([numbered_key(0)])) == [(0, 1, 1)]


def test_many_at_once_leave_what_one_after_the_other_leaves() -> None:
    together, one_by_one = UseCounts(16, uses_max=10), UseCounts(16, uses_max=10)
    keys = [numbered_key(i) for i in range(5_000)]  # more than there are cells: they collide
    for start, uses in ((0, 3), (2_000, 5)):
        together.set(keys[start:], uses)
        for key in keys[start:]:
            one_by_one.set([key], uses)
    found = [list(together.runs([key])) for key in keys]
    assert found == [list(one_by_one.runs([key])) for key in keys]
    assert [(0, 1, 6)] in found
