"""What every manager has to keep: the promises of `core.manager` as tests."""

import pytest
from hypothesis.stateful import run_state_machine_as_test

from kvstrata.testing.machines import machine_settings
from kvstrata.testing.manager_copies_suite import ManagerCopiesSuite
from kvstrata.testing.manager_machine import ManagerMachine
from kvstrata.testing.manager_preemption_suite import ManagerPreemptionSuite
from kvstrata.testing.manager_requests_suite import ManagerRequestsSuite


class OffloadingManagerSuite(ManagerCopiesSuite, ManagerPreemptionSuite, ManagerRequestsSuite):
    """Derive from it and override `make_manager`."""

    num_examples: int = 20
    """Sequences of calls that the state machine tries."""

    @pytest.mark.hypothesis
    def test_no_order_of_calls_breaks_the_contract(self) -> None:
        machine = type("Machine", (ManagerMachine,), {"suite": self})
        run_state_machine_as_test(machine, settings=machine_settings(self.num_examples))
