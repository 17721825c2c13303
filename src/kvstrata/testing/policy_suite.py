"""What every eviction policy has to keep: the promises of `core.policy` as tests."""

import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import EvictionPolicy, RequestTrail
from kvstrata.testing.chunks import chain, numbered_key
from kvstrata.testing.policy_machine import PolicyMachine

HOUR_S = 3_600.0


def all_may_leave(keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
    """Say that no chunk is busy."""
    return keys


def none_may_leave(_keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
    """Say that every chunk is busy."""
    return ()


def fill(
    policy: EvictionPolicy,
    keys: Sequence[OffloadKey],
    now_s: float = 0.0,
    *,
    trail: RequestTrail | None = None,
) -> RequestTrail:
    """Let one request use these chunks and store those that are new; there has to be room."""
    trail = trail or RequestTrail()
    policy.access(trail, list(keys), now_s)
    new = [key for key in keys if key not in policy]
    if new:
        num_free = policy.capacity - len(policy)
        admission = policy.admit(trail, new, num_free, all_may_leave, now_s)
        assert admission.num_admitted == len(new)
        assert not admission.victims
    return trail


class PolicySuite:
    """Derive from it and override `make`."""

    num_examples: int = 100
    """Sequences of calls that the state machine tries."""

    def make(self, capacity: int) -> EvictionPolicy:
        """Return the policy, empty, with room for `capacity` chunks."""
        raise NotImplementedError

    def test_no_order_of_calls_breaks_the_contract(self) -> None:
        machine = type("Machine", (PolicyMachine,), {"make": staticmethod(self.make)})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=self.num_examples,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )

    def test_room_for_nothing_is_refused(self) -> None:
        with pytest.raises(ValueError, match="capacity"):
            self.make(0)

    def test_chunks_are_admitted_without_victims_while_there_is_room(self) -> None:
        policy = self.make(4)
        fill(policy, chain("abcd"))
        assert len(policy) == 4
        assert set(policy.choose(9, all_may_leave)) == set(chain("abcd"))
        policy.check()

    def test_tails_leave_before_heads_whatever_order_they_were_stored_in(self) -> None:
        policy = self.make(8)
        keys = chain("abcdefgh")
        trail = RequestTrail()
        policy.access(trail, keys, 0.0)
        for part in (keys[4:6], keys[0:4], keys[6:8]):
            policy.admit(trail, part, 8 - len(policy), all_may_leave, 1.0)
        assert list(policy.choose(3, all_may_leave)) == [keys[7], keys[6], keys[5]]

    def test_victims_of_a_later_request_are_tails(self) -> None:
        policy = self.make(4)
        keys = chain("abcd")
        fill(policy, keys)
        trail = RequestTrail()
        now_s = 10 * HOUR_S
        policy.access(trail, chain("xy"), now_s)
        admission = policy.admit(trail, chain("xy"), 0, all_may_leave, now_s)
        assert list(admission.victims) == keys[::-1][: admission.num_admitted]
        assert admission.num_admitted == 2 or admission.is_refusal
        assert (chain("x")[0] in policy) == (admission.num_admitted > 0)

    def test_what_cannot_leave_makes_no_room(self) -> None:
        policy = self.make(2)
        fill(policy, chain("ab"))
        trail = RequestTrail()
        policy.access(trail, chain("xy"), HOUR_S)
        admission = policy.admit(trail, chain("xy"), 0, none_may_leave, HOUR_S)
        assert admission.num_admitted == 0
        assert list(admission.victims) == []
        assert set(chain("ab")) == {key for key in chain("ab") + chain("xy") if key in policy}

    def test_interleaved_requests_both_count_as_recent(self) -> None:
        policy = self.make(12)
        fill(policy, chain("wxyz"), 0.0)
        first, second = fill(policy, chain("abcd"), 1.0), fill(policy, chain("efgh"), 2.0)
        for num_keys in range(1, 5):
            policy.access(first, chain("abcd")[:num_keys], HOUR_S)
            policy.access(second, chain("efgh")[:num_keys], HOUR_S)
        assert set(policy.choose(4, all_may_leave)) == set(chain("wxyz"))

    def test_a_used_chunk_outlives_one_that_was_not(self) -> None:
        policy = self.make(4)
        fill(policy, chain("ab"), 0.0)
        fill(policy, chain("cd"), 1.0)
        policy.access(RequestTrail(), chain("ab"), 2.0)
        assert set(policy.choose(2, all_may_leave)) == set(chain("cd"))

    def test_repeated_access_by_one_request_counts_once(self) -> None:
        orders = []
        for num_repeats in (1, 500):
            policy = self.make(8)
            fill(policy, chain("ab"), 0.0)
            fill(policy, chain("ab"), 1.0)
            trail = fill(policy, chain("cd"), 2.0)
            for _ in range(num_repeats):
                policy.access(trail, chain("cd"), 3.0)
            fill(policy, chain("ef"), 4.0)
            victims: list[OffloadKey] = []
            for number in range(40):
                other, key = RequestTrail(), numbered_key(number)
                now_s = 5.0 + number * HOUR_S
                policy.access(other, [key], now_s)
                victims += policy.admit(other, [key], 8 - len(policy), all_may_leave, now_s).victims
            orders.append(victims)
        assert orders[0] == orders[1]

    def test_a_lower_class_leaves_first_however_recent(self) -> None:
        policy = self.make(6)
        fill(policy, chain("ab"), 0.0, trail=RequestTrail(priority=90))
        fill(policy, chain("cd"), 1.0)
        fill(policy, chain("ef"), 2.0, trail=RequestTrail(priority=10))
        assert set(policy.choose(2, all_may_leave)) == set(chain("ef"))
        assert set(policy.choose(4, all_may_leave)) == set(chain("cd") + chain("ef"))

    def test_single_chunks_may_be_of_a_higher_class(self) -> None:
        policy = self.make(6)
        keys = chain("abcd")
        fill(policy, keys, 0.0, trail=RequestTrail(key_priority=dict.fromkeys(keys[:2], 90)))
        fill(policy, chain("ef"), 1.0)
        assert set(policy.choose(4, all_may_leave)) == {*keys[2:], *chain("ef")}

    def test_a_removed_chunk_can_be_admitted_again(self) -> None:
        policy = self.make(2)
        trail = fill(policy, chain("ab"))
        policy.remove([*chain("ab"), *chain("xyz")])
        assert len(policy) == 0
        assert list(policy.choose(2, all_may_leave)) == []
        fill(policy, chain("ab"), 1.0, trail=trail)
        assert list(policy.choose(2, all_may_leave)) == chain("ab")[::-1]

    def test_clear_forgets_all_and_old_requests_may_go_on(self) -> None:
        policy = self.make(2)
        trail = fill(policy, chain("ab"))
        policy.clear()
        assert len(policy) == 0
        assert chain("a")[0] not in policy
        policy.check()
        fill(policy, chain("ab"), 1.0, trail=trail)
        assert list(policy.choose(2, all_may_leave)) == chain("ab")[::-1]

    def test_choosing_a_few_asks_about_few(self) -> None:
        policy = self.make(4_000)
        for number in range(1_000):
            fill(policy, [numbered_key(4 * number + i) for i in range(4)], float(number))
        asked: list[OffloadKey] = []

        def evictable(keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
            asked.extend(keys)
            return keys

        assert len(policy.choose(8, evictable)) == 8
        assert len(asked) < 400

    def test_memory_does_not_grow_with_the_number_of_chunks_seen(self) -> None:
        policy = self.make(16)

        def see(first: int, last: int) -> None:
            for number in range(first, last):
                trail, keys = (
                    RequestTrail(),
                    [numbered_key(2 * number), numbered_key(2 * number + 1)],
                )
                policy.access(trail, keys, 60.0 * number)
                policy.admit(trail, keys, 16 - len(policy), all_may_leave, 60.0 * number)

        see(0, 1_000)
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            see(1_000, 4_000)
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        policy.check()
        assert after - before < 300_000, "6,000 chunks later it holds this many bytes more"
