"""Runs the policy suite on every policy that has a name."""

from typing_extensions import override

from kvstrata.policies.lru import LruPolicy
from kvstrata.testing import PolicySuite


class TestLruPolicy(PolicySuite):
    @override
    def make(self, capacity: int) -> LruPolicy:
        return LruPolicy(capacity)
