"""Drives manager, policy and slots together against a plain model: many steps, every policy."""

from typing import ClassVar

import pytest
from hypothesis.stateful import invariant, run_state_machine_as_test
from typing_extensions import override

from kvstrata.build import POLICIES, build_manager
from kvstrata.core.manager import OffloadingManager
from kvstrata.testing import OffloadingManagerSuite
from kvstrata.testing.machines import machine_settings
from kvstrata.testing.manager_machine import ManagerMachine

STEPS_PER_EXAMPLE = 50
NUM_STEPS = {"lru": 100_000}
NUM_STEPS_OF_OTHERS = 25_000


def run_steps(policy: str, num_examples: int) -> int:
    """Try so many sequences of calls; return how many calls they were."""

    class Suite(OffloadingManagerSuite):
        @override
        def make_manager(self, num_chunks: int, chunk_bytes: int) -> OffloadingManager:
            return build_manager(
                {"primary": {"num_chunks": num_chunks, "policy": policy}},
                chunk_bytes=chunk_bytes,
                namespace="model",
                clock=self.clock,
            )

    class Machine(ManagerMachine):
        suite = Suite()
        num_steps: ClassVar = 0

        @invariant()
        def count(self) -> None:
            type(self).num_steps += 1

    run_state_machine_as_test(Machine, settings=machine_settings(num_examples, STEPS_PER_EXAMPLE))
    return Machine.num_steps


@pytest.mark.hypothesis
@pytest.mark.parametrize("policy", POLICIES.names())
def test_no_order_of_calls_breaks_the_primary(policy: str) -> None:
    assert run_steps(policy, 10) > 100


@pytest.mark.hypothesis
@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES.names())
def test_no_order_of_very_many_calls_breaks_the_primary(policy: str) -> None:
    num_steps = NUM_STEPS.get(policy, NUM_STEPS_OF_OTHERS)
    num_examples = int(1.25 * num_steps / STEPS_PER_EXAMPLE)  # some end early
    assert run_steps(policy, num_examples) >= num_steps
