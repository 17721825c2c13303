"""What every manager has to keep: the promises of `core.manager` as tests."""

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvstrata.testing.manager_copies_suite import ManagerCopiesSuite
from kvstrata.testing.manager_machine import ManagerMachine
from kvstrata.testing.manager_preemption_suite import ManagerPreemptionSuite
from kvstrata.testing.manager_requests_suite import ManagerRequestsSuite


class OffloadingManagerSuite(ManagerCopiesSuite, ManagerPreemptionSuite, ManagerRequestsSuite):
    """Derive from it and override `make_manager`."""

    num_examples: int = 20
    """Sequences of calls that the state machine tries."""

    def test_no_order_of_calls_breaks_the_contract(self) -> None:
        machine = type("Machine", (ManagerMachine,), {"suite": self})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=self.num_examples,
                stateful_step_count=40,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
