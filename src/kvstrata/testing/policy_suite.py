"""What every eviction policy has to keep: the promises of `core.policy` as tests."""

import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis.stateful import run_state_machine_as_test
from typing_extensions import override

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import EvictionPolicy, RequestTrail, Run
from kvstrata.testing.chunks import chain, numbered_key
from kvstrata.testing.machines import machine_settings
from kvstrata.testing.policy_driver import PolicyDriver
from kvstrata.testing.policy_machine import PolicyMachine

HOUR_S = 3_600.0


def fill(
    driver: PolicyDriver,
    keys: Sequence[OffloadKey],
    now_s: float = 0.0,
    *,
    trail: RequestTrail | None = None,
) -> RequestTrail:
    """Let one request use these chunks and store those that are new; there has to be room."""
    trail = trail or RequestTrail()
    driver.access(trail, keys, now_s)
    new = [key for key in keys if key not in driver.keys]
    if new:
        num_admitted, left, _ = driver.offer(trail, new, now_s)
        assert (num_admitted, left) == (len(new), [])
    return trail


class PolicySuite:
    """Derive from it and override `make`."""

    num_examples: int = 30
    """Sequences of calls that the state machine tries."""

    def make(self, capacity: int) -> EvictionPolicy:
        """Return the policy, empty, with room for `capacity` chunks."""
        raise NotImplementedError

    def driver(self, capacity: int) -> PolicyDriver:
        """Return a caller of a new policy."""
        return PolicyDriver(self.make(capacity))

    def test_asking_who_leaves_next_does_not_change_who_that_is(self) -> None:
        driver = self.driver(3)
        keys = chain("abc")
        fill(driver, keys)
        driver.remove(keys[1:2])
        assert driver.choose(1) == driver.choose(1) == driver.choose(1)

    @pytest.mark.hypothesis
    def test_no_order_of_calls_breaks_the_contract(self) -> None:
        machine = type("Machine", (PolicyMachine,), {"make": staticmethod(self.make)})
        run_state_machine_as_test(machine, settings=machine_settings(self.num_examples))

    def test_room_for_nothing_is_refused(self) -> None:
        with pytest.raises(ValueError, match="capacity"):
            self.make(0)

    def test_chunks_are_admitted_without_victims_while_there_is_room(self) -> None:
        driver = self.driver(4)
        fill(driver, chain("abcd"))
        assert driver.keys == set(chain("abcd")) == set(driver.choose(9))
        driver.check()

    def test_tails_leave_before_heads(self) -> None:
        # Field report G10.
        driver = self.driver(8)
        keys = chain("abcdefgh")
        trail = RequestTrail()
        driver.access(trail, keys, 0.0)
        for part in (keys[:3], keys[3:6], keys[6:]):
            driver.offer(trail, part, 1.0)
        assert driver.choose(3) == [keys[7], keys[6], keys[5]]

    @pytest.mark.parametrize("num_parts", [2, 4])
    def test_tails_leave_before_heads_however_a_request_is_cut(self, num_parts: int) -> None:
        driver = self.driver(8)
        keys, trail, size = chain("abcdefgh"), RequestTrail(), 8 // num_parts
        driver.access(trail, keys, 0.0)
        for start in range(0, 8, size):
            driver.offer(trail, keys[start : start + size], 1.0)
        assert driver.choose(8) == keys[::-1]
        driver.unhold(driver.hold(keys[3:5]))  # cuts once more
        assert driver.choose(8) == keys[::-1]
        driver.access(trail, keys, 2.0)
        assert driver.choose(8) == keys[::-1]

    def test_victims_of_a_later_request_are_tails(self) -> None:
        driver = self.driver(4)
        keys = chain("abcd")
        fill(driver, keys)
        trail = RequestTrail()
        driver.access(trail, chain("xy"), 10 * HOUR_S)
        num_admitted, left, is_refusal = driver.offer(trail, chain("xy"), 10 * HOUR_S)
        assert left == keys[::-1][:num_admitted]
        assert num_admitted == 2 or is_refusal

    def test_what_is_held_makes_no_room(self) -> None:
        driver = self.driver(2)
        fill(driver, chain("ab"))
        driver.hold(chain("ab"))
        trail = RequestTrail()
        driver.access(trail, chain("xy"), HOUR_S)
        assert driver.offer(trail, chain("xy"), HOUR_S)[:2] == (0, [])
        assert driver.choose(2) == []
        assert driver.keys == set(chain("ab"))

    def test_a_request_never_displaces_its_own_chunks(self) -> None:
        driver = self.driver(4)
        trail = fill(driver, chain("abcd"))
        fill(driver, chain("ab"), 1.0)  # another one used them last
        assert driver.offer(trail, chain("abcdef")[4:], HOUR_S)[:2] == (0, [])

    def test_interleaved_requests_both_count_as_recent(self) -> None:
        # Field report G11.
        driver = self.driver(12)
        fill(driver, chain("wxyz"), 0.0)
        first, second = fill(driver, chain("abcd"), 1.0), fill(driver, chain("efgh"), 2.0)
        for num_keys in range(1, 5):
            driver.access(first, chain("abcd")[:num_keys], HOUR_S)
            driver.access(second, chain("efgh")[:num_keys], HOUR_S)
        assert set(driver.choose(4)) == set(chain("wxyz"))

    def test_a_used_chunk_outlives_one_that_was_not(self) -> None:
        driver = self.driver(4)
        fill(driver, chain("ab"), 0.0)
        fill(driver, chain("cd"), 1.0)
        driver.access(RequestTrail(), chain("ab"), 2.0)
        assert driver.choose(2) == chain("cd")[::-1]

    def test_repeated_access_by_one_request_counts_once(self) -> None:
        # Field report G14.
        orders = []
        for num_repeats in (1, 500):
            driver = self.driver(8)
            fill(driver, chain("ab"), 0.0)
            fill(driver, chain("ab"), 1.0)
            trail = fill(driver, chain("cd"), 2.0)
            for _ in range(num_repeats):
                driver.access(trail, chain("cd"), 3.0)
            fill(driver, chain("ef"), 4.0)
            victims: list[OffloadKey] = []
            for number in range(40):
                other, key = RequestTrail(), numbered_key(number)
                now_s = 5.0 + number * HOUR_S
                driver.access(other, [key], now_s)
                victims += driver.offer(other, [key], now_s)[1]
            orders.append(victims)
        assert orders[0] == orders[1]

    def test_a_removed_chunk_can_be_admitted_again(self) -> None:
        driver = self.driver(2)
        trail = fill(driver, chain("ab"))
        driver.remove([*chain("ab"), *chain("xyz")])
        assert driver.choose(2) == []
        fill(driver, chain("ab"), 1.0, trail=trail)
        assert driver.choose(2) == chain("ab")[::-1]

    def test_clear_forgets_all_and_old_requests_may_go_on(self) -> None:
        driver = self.driver(2)
        trail = fill(driver, chain("ab"))
        driver.clear()
        driver.check()
        assert driver.choose(2) == []
        fill(driver, chain("ab"), 1.0, trail=trail)
        assert driver.choose(2) == chain("ab")[::-1]

    def test_choosing_a_few_looks_at_few(self) -> None:
        driver = self.driver(4_000)
        for number in range(1_000):
            fill(driver, [numbered_key(4 * number + i) for i in range(4)], float(number))
        seen: set[int] = set()

        class WatchedRun(Run):
            @override
            def __getattribute__(self, name: str) -> Any:
                seen.add(id(self))
                return super().__getattribute__(name)

        for run in driver.policy.runs():
            run.__class__ = WatchedRun
        assert len(driver.choose(8)) == 8
        assert len(seen) < 100

    @pytest.mark.parametrize(
        ("num_paths", "bytes_max"), [(10**6, 400_000), (10, 120_000)], ids=["new", "come back"]
    )
    def test_memory_does_not_grow_with_the_number_of_chunks_seen(
        self, num_paths: int, bytes_max: int
    ) -> None:
        # Field report F06, for side tables. Each path is used twice; ten come back when they left.
        driver = self.driver(16)

        def see(first: int, last: int) -> None:
            for number in range(first, last):
                path = number // 2 % num_paths
                trail, keys = RequestTrail(), [numbered_key(2 * path + i) for i in (0, 1)]
                driver.access(trail, keys, 60.0 * number)
                if new := [key for key in keys if key not in driver.keys]:
                    driver.offer(trail, new, 60.0 * number)

        see(0, 1_000)
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            see(1_000, 7_000)
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        driver.check()
        assert after - before < bytes_max, "6,000 requests later it holds this many bytes more"
