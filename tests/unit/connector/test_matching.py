"""What each group needs, and the longest prefix that all of them can serve."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.connector import GroupKind, KVGroup, SchedulerOffloadConfig
from kvstrata.connector.matching import PrefixMatcher, first_needed_token, needed_range
from kvstrata.core.keys import OffloadKey, get_group_idx, make_offload_key
from kvstrata.core.request import ReqContext
from kvstrata.core.results import LookupResult
from tests.toy_engine import ToyEngine, ToySettings

HIT, PENDING, RETRY, MISS = (
    LookupResult.HIT,
    LookupResult.HIT_PENDING,
    LookupResult.RETRY,
    LookupResult.MISS,
)
CTX = ReqContext("r")


class ScriptedManager:
    """Says of each chunk what the script says; waits for whatever is not settled yet."""

    def __init__(self, states: Sequence[Sequence[LookupResult]]) -> None:
        self.state_of = {
            key: state
            for g, group in enumerate(states)
            for key, state in zip(keys_of(g, len(group)), group, strict=True)
        }
        self.asked: list[OffloadKey] = []

    def lookup_states(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> list[LookupResult]:
        return [self.state_of[key] for key in keys]

    def lookup(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> int | None:
        self.asked += keys
        for i, key in enumerate(keys):
            if self.state_of[key] is not HIT:
                return None if self.state_of[key] is not MISS else i
        return len(keys)


def keys_of(group_idx: int, num: int) -> list[OffloadKey]:
    return [make_offload_key(bytes([i]), group_idx) for i in range(num)]


def find(
    groups: Sequence[KVGroup],
    states: Sequence[Sequence[LookupResult]],
    num_local: int = 0,
    num_tokens: int = 1000,
) -> tuple[int | None, ScriptedManager]:
    manager = ScriptedManager(states)
    matcher = PrefixMatcher(manager, SchedulerOffloadConfig(tuple(groups), 1))  # type: ignore[arg-type]
    keys = [keys_of(g, len(group)) for g, group in enumerate(states)]
    return matcher.find(keys, CTX, num_local, num_tokens), manager


def window(tokens_per_block: int, window_tokens: int, span: int = 1) -> KVGroup:
    return KVGroup(tokens_per_block, span, GroupKind.WINDOW, window_tokens)


def test_a_pending_chunk_behind_a_missing_one_does_not_delay_a_window() -> None:
    # Two chunks are needed at each end: I02.
    end, manager = find([window(4, 8)], [[HIT, HIT, MISS, RETRY]])
    assert end == 8
    assert manager.asked == keys_of(0, 2)


def test_a_window_group_waits_for_a_pending_chunk_that_its_window_needs() -> None:
    assert find([window(4, 8)], [[MISS, HIT, PENDING]])[0] is None


def test_a_window_group_asks_only_for_the_chunks_of_its_window() -> None:
    end, manager = find([window(4, 8)], [[MISS, MISS, HIT, HIT]])
    assert end == 16
    assert manager.asked == keys_of(0, 4)[2:]


def test_a_hole_in_the_window_shortens_the_answer_to_where_it_starts() -> None:
    assert find([window(4, 12)], [[HIT, HIT, HIT, MISS, HIT]])[0] == 12


def test_the_answer_is_what_every_group_can_serve() -> None:
    # Presence of both at once, evicted one by one: I04.
    full = KVGroup(4)
    assert find([full, full], [[HIT] * 8, [HIT] * 6 + [MISS] * 2])[0] == 24


def test_nothing_is_fetched_for_a_prefix_that_another_group_misses() -> None:
    full = KVGroup(4)
    end, manager = find([full, full], [[HIT, RETRY, RETRY], [MISS, HIT, HIT]])
    assert end == 0
    assert manager.asked == []


def test_groups_of_unequal_chunks_meet_at_a_common_multiple() -> None:
    groups = [KVGroup(4), KVGroup(6)]
    assert find(groups, [[HIT] * 9, [HIT] * 5])[0] == 24
    assert find(groups, [[HIT] * 9, [HIT] * 3 + [MISS] * 2])[0] == 12


def test_a_pending_chunk_that_every_group_needs_makes_the_request_wait() -> None:
    full = KVGroup(4)
    assert find([full, full], [[HIT, HIT], [HIT, RETRY]])[0] is None


def test_one_token_is_left_to_compute() -> None:
    assert find([KVGroup(4)], [[HIT] * 3], num_tokens=12)[0] == 11
    assert find([KVGroup(4)], [[HIT] * 3], num_tokens=13)[0] == 12


def test_what_the_engine_has_is_not_asked_for() -> None:
    end, manager = find([KVGroup(4)], [[MISS, MISS, HIT, HIT]], num_local=8)
    assert end == 16
    assert manager.asked == keys_of(0, 4)[2:]


def test_an_engine_that_has_all_but_one_token_gets_nothing() -> None:
    end, manager = find([KVGroup(4)], [[HIT] * 3], num_local=11, num_tokens=12)
    assert end == 11
    assert manager.asked == []


@given(st.integers(1, 200), st.integers(1, 64), st.integers(0, 500), st.integers(0, 500))
def test_needed_blocks_agree_with_counting_tokens(
    window_tokens: int, tokens_per_block: int, one: int, other: int
) -> None:
    start, end = sorted((one, other))
    group = window(tokens_per_block, window_tokens)
    attended = [i for i in range(start, end) if end - i < window_tokens]
    blocks = sorted({i // tokens_per_block for i in attended})
    found = needed_range(group, start, end, tokens_per_block)
    assert list(found) == blocks
    full = KVGroup(tokens_per_block)
    all_blocks = sorted({i // tokens_per_block for i in range(start, end)})
    assert list(needed_range(full, start, end, tokens_per_block)) == all_blocks


@given(
    st.lists(
        st.tuples(st.sampled_from([2, 3, 4]), st.none() | st.integers(1, 20)),
        min_size=1,
        max_size=3,
    ),
    st.data(),
)
def test_the_answer_is_the_longest_that_can_be_served(
    kinds: list[tuple[int, int | None]], data: st.DataObject
) -> None:
    groups = [KVGroup(t) if w is None else window(t, w) for t, w in kinds]
    states = [
        data.draw(
            st.lists(st.sampled_from([HIT, HIT, HIT, MISS]), min_size=12 // t, max_size=48 // t)
        )
        for t, _ in kinds
    ]
    config = SchedulerOffloadConfig(tuple(groups), 1)
    num_tokens = data.draw(st.integers(1, 50))
    states = [s[: num_tokens // t] for s, (t, _) in zip(states, kinds, strict=True)]

    def can_serve(end: int) -> bool:
        return all(
            all(
                idx < len(s) and s[idx] is HIT
                for idx in {i // t for i in range(first_needed_token(g, end), end)}
            )
            for g, s, (t, _) in zip(groups, states, kinds, strict=True)
        )

    longest = min(len(s) * t for s, (t, _) in zip(states, kinds, strict=True))
    ends = range(0, longest + 1, config.tokens_per_match)
    expected = max(e for end in ends if can_serve(e := min(end, num_tokens - 1)))
    assert find(groups, states, num_tokens=num_tokens)[0] == expected


@pytest.mark.parametrize("window_tokens", [None, 1, 3, 8, 9, 30])
@pytest.mark.parametrize("span", [1, 2, 3])
def test_what_was_stored_is_found_at_every_length(window_tokens: int | None, span: int) -> None:
    # The store rule and the lookup rule agree: H01.
    kind = KVGroup(4, span) if window_tokens is None else window(4, window_tokens, span)
    for num_tokens in range(1, 41):
        engine = ToyEngine(ToySettings((kind,), tokens_per_step=100))
        engine.add("first", range(num_tokens))
        engine.finish()
        again = engine.add("second", range(num_tokens))
        found = engine.connector.get_num_new_matched_tokens(again, 0).num_tokens
        assert found == min(num_tokens // (4 * span) * 4 * span, num_tokens - 1)
        engine.finish()


def test_unequal_groups_store_what_they_find_again() -> None:
    groups = (KVGroup(4, 2), window(8, 10), KVGroup(16))
    for num_tokens in range(1, 70):
        engine = ToyEngine(ToySettings(groups, num_blocks=99, tokens_per_step=100))
        engine.add("first", range(num_tokens))
        engine.finish()
        again = engine.add("second", range(num_tokens))
        found = engine.connector.get_num_new_matched_tokens(again, 0).num_tokens
        assert found == min(num_tokens // 16 * 16, num_tokens - 1)
        engine.finish()


def test_each_group_is_asked_by_its_own_keys() -> None:
    full = KVGroup(4)
    _, manager = find([full, full], [[HIT], [HIT]])
    assert [get_group_idx(key) for key in manager.asked] == [0, 1]
