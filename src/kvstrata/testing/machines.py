"""How long the random tests of the suites try, and whether always the same."""

import os
from typing import Final

from hypothesis import HealthCheck, settings

HUNT: Final = "KVSTRATA_HUNT"
"""With this variable in the environment random tests try new examples in every run."""


def machine_settings(num_examples: int, num_steps: int = 40) -> settings:
    """Return settings for a machine: so many sequences of so many calls.

    They are the same ones in every run, so that what passed once passes again; see `HUNT`.
    """
    return settings(
        max_examples=num_examples,
        stateful_step_count=num_steps,
        deadline=None,
        derandomize=HUNT not in os.environ,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
