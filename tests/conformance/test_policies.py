"""Runs the policy suite on every policy that has a name, alone and in priority classes."""

import pytest
from typing_extensions import override

from kvstrata.build import POLICIES, make_policy
from kvstrata.core.policy import EvictionPolicy, RequestTrail
from kvstrata.policies.arc import ArcPolicy
from kvstrata.policies.guard import GuardPolicy
from kvstrata.policies.hazard import HazardPolicy, LeanHazardPolicy
from kvstrata.policies.lru import LruPolicy
from kvstrata.policies.partitioned import PartitionedPolicy
from kvstrata.testing import PolicySuite, chain
from kvstrata.testing.policy_driver import PolicyDriver
from kvstrata.testing.policy_suite import HOUR_S, fill


class TestLruPolicy(PolicySuite):
    @override
    def make(self, capacity: int) -> EvictionPolicy:
        return LruPolicy(capacity)


def trail(priority: int = 50, pool: str | None = None) -> RequestTrail:
    found = RequestTrail()
    found.priority, found.pool = priority, pool
    return found


class TestPartitionedPolicy(PolicySuite):
    @override
    def make(self, capacity: int) -> EvictionPolicy:
        return PartitionedPolicy(LruPolicy(capacity), LruPolicy)

    def test_a_lower_class_leaves_first_however_recent(self) -> None:
        driver = self.driver(6)
        fill(driver, chain("ab"), 0.0, trail=trail(priority=90))
        fill(driver, chain("cd"), 1.0)
        fill(driver, chain("ef"), 2.0, trail=trail(priority=10))
        assert driver.choose(4) == [*chain("ef")[::-1], *chain("cd")[::-1]]

    def test_single_chunks_may_be_of_a_higher_class(self) -> None:
        driver = self.driver(6)
        keys = chain("abcd")
        request = trail()
        request.key_priority = dict.fromkeys(keys[:2], 90)
        fill(driver, keys, 0.0, trail=request)
        fill(driver, chain("ef"), 1.0)
        assert driver.choose(4) == [*keys[:1:-1], *chain("ef")[::-1]]

    def test_a_new_chunk_displaces_none_of_a_higher_class(self) -> None:
        driver = self.driver(2)
        fill(driver, chain("ab"), 0.0, trail=trail(priority=90))
        assert driver.offer(trail(), chain("xy"), HOUR_S)[:2] == (0, [])
        assert driver.offer(trail(priority=90), chain("xy"), HOUR_S)[0] == 2

    def test_a_use_of_higher_class_raises_what_it_uses(self) -> None:
        driver = self.driver(4)
        fill(driver, chain("ab"), 0.0)
        fill(driver, chain("cd"), 1.0)
        driver.access(trail(priority=90), chain("ab"), 2.0)
        driver.access(trail(), chain("cd"), 3.0)
        assert driver.choose(2) == chain("cd")[::-1]
        driver.access(trail(), chain("ab"), 4.0)
        assert driver.choose(2) == chain("cd")[::-1]

    def test_classes_above_the_default_are_bounded(self) -> None:
        driver = PolicyDriver(PartitionedPolicy(LruPolicy(4), LruPolicy, num_priority_max=2))
        fill(driver, chain("ab"), 0.0, trail=trail(priority=90))
        fill(driver, chain("cd"), 1.0, trail=trail(priority=90))
        num_admitted, left, _ = driver.offer(trail(), chain("xy"), HOUR_S)
        assert (num_admitted, left) == (2, chain("cd")[::-1])
        driver.check()

    def test_a_use_does_not_raise_more_than_the_bound(self) -> None:
        driver = PolicyDriver(PartitionedPolicy(LruPolicy(4), LruPolicy, num_priority_max=2))
        fill(driver, chain("abcd"), 0.0)
        driver.access(trail(priority=90), chain("abc"), 1.0)
        assert driver.offer(trail(), chain("wxyz"), HOUR_S)[0] == 4
        driver.check()

    def test_what_follows_a_chunk_that_found_no_room_above_stands_no_higher(self) -> None:
        driver = PolicyDriver(PartitionedPolicy(LruPolicy(4), LruPolicy, num_priority_max=2))
        request, keys = trail(priority=90), chain("abcd")
        fill(driver, keys[:3], 0.0, trail=request)
        fill(driver, keys, 1.0, trail=request)
        assert driver.choose(4) == keys[::-1]

    def test_what_follows_a_chunk_that_can_not_be_raised_is_not_raised_either(self) -> None:
        driver = PolicyDriver(PartitionedPolicy(LruPolicy(4), LruPolicy, num_priority_max=2))
        keys = chain("abcd")
        fill(driver, keys[:3], 0.0, trail=trail(priority=10))
        fill(driver, keys, 1.0, trail=trail(priority=10))
        driver.access(trail(priority=90), keys, 2.0)
        assert driver.choose(4) == keys[::-1]
        assert driver.offer(trail(priority=20), chain("x"), 3.0)[:2] == (0, [])
        driver.check()

    def test_a_pool_stays_within_its_quota_and_others_beside_it(self) -> None:
        driver = PolicyDriver(PartitionedPolicy(LruPolicy(4), LruPolicy, quotas={"small": 2}))
        small = trail(pool="small")
        assert driver.offer(small, chain("ab"), 0.0)[0] == 2
        num_admitted, left, _ = driver.offer(trail(pool="small"), chain("xyz"), 1.0)
        assert (num_admitted, left) == (2, chain("ab")[::-1])
        driver.check()
        fill(driver, chain("cd"), 2.0)
        num_admitted, left, _ = driver.offer(trail(pool="small"), chain("u"), 3.0)
        assert (num_admitted, left) == (1, chain("xy")[1:])
        driver.check()

    @pytest.mark.parametrize("name", POLICIES.names())
    @pytest.mark.parametrize("num_uses", [1, 2, 3])
    def test_a_raised_chunk_is_no_victim_of_its_former_class(
        self, name: str, num_uses: int
    ) -> None:
        policy = PartitionedPolicy(make_policy(name, 1), lambda size: make_policy(name, size))
        driver = PolicyDriver(policy)
        fill(driver, chain("a"))
        for _ in range(num_uses - 1):
            driver.access(trail(), chain("a"), 0.0)
        driver.access(trail(priority=90), chain("a"), 0.0)
        assert driver.offer(trail(), chain("x"), HOUR_S)[:2] == (0, [])
        driver.check()

    def test_room_beyond_the_quota_goes_to_the_one_who_asks(self) -> None:
        driver = PolicyDriver(PartitionedPolicy(LruPolicy(4), LruPolicy, quotas={"small": 2}))
        fill(driver, chain("abcd"), 0.0)
        num_admitted, left, _ = driver.offer(trail(pool="small"), chain("xyz"), HOUR_S)
        assert (num_admitted, left) == (2, chain("abcd")[:1:-1])
        driver.check()


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", [*POLICIES.names(), "auto"])
class TestNamedPolicy:
    """Whatever a configuration can name keeps the contract."""

    def test_no_order_of_calls_breaks_the_contract(self, name: str) -> None:
        class Named(PolicySuite):
            @override
            def make(self, capacity: int) -> EvictionPolicy:
                return make_policy(name, capacity)

        Named().test_no_order_of_calls_breaks_the_contract()

    def test_no_order_of_calls_breaks_the_contract_in_priority_classes(self, name: str) -> None:
        class Partitioned(PolicySuite):
            @override
            def make(self, capacity: int) -> EvictionPolicy:
                common = make_policy(name, capacity)
                return PartitionedPolicy(common, lambda size: make_policy(name, size))

        Partitioned().test_no_order_of_calls_breaks_the_contract()


class TestArcPolicy(PolicySuite):
    @override
    def make(self, capacity: int) -> ArcPolicy:
        return ArcPolicy(capacity)


class TestGuardPolicy(PolicySuite):
    @override
    def make(self, capacity: int) -> GuardPolicy:
        return GuardPolicy(capacity)


class TestHazardPolicy(PolicySuite):
    @override
    def make(self, capacity: int) -> HazardPolicy:
        return HazardPolicy(capacity)


class TestLeanHazardPolicy(PolicySuite):
    @override
    def make(self, capacity: int) -> LeanHazardPolicy:
        return LeanHazardPolicy(capacity)
