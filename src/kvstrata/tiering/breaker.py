"""A breaker: skips what fails again and again, tries it from time to time, and takes it back."""

import logging
from enum import Enum

from kvstrata.core.clock import Clock

logger = logging.getLogger("kvstrata.tiering")


class BreakerState(Enum):
    """`OPEN` skips, `PROBING` waits for the one job that was let through to see."""

    OK = "ok"
    OPEN = "open"
    PROBING = "probing"


class Breaker:
    """Opens after some failures in a row; from then on one probe per cooldown, until one works."""

    def __init__(self, name: str, num_failures_max: int, cooldown_s: float, clock: Clock) -> None:
        self.state = BreakerState.OK
        self.num_opened = 0
        self._name = name
        self._num_failures_max = num_failures_max
        self._cooldown_s = cooldown_s
        self._clock = clock
        self._num_failures = 0
        self._rests_until_s = 0.0
        self._is_call_failing = False

    def lets_through(self) -> bool:
        """Say whether to try. Changes nothing."""
        return self.state is BreakerState.OK or self._clock.now_s() >= self._rests_until_s

    def note_try(self) -> None:
        """A job was let through; if the breaker is open, it is the probe, and others wait for it.

        A probe that never ends is followed by another one after the cooldown.
        """
        if self.state is not BreakerState.OK:
            self.state = BreakerState.PROBING
            self._rests_until_s = self._clock.now_s() + self._cooldown_s

    def note_answer(self) -> None:
        """A call was answered; that is enough if calls were what failed."""
        if self._is_call_failing:
            self.note_success()

    def note_success(self) -> None:
        """A job worked."""
        if self.state is not BreakerState.OK:
            logger.info("%s: works again", self._name)
        self.state = BreakerState.OK
        self._num_failures = 0
        self._is_call_failing = False

    def note_failed_call(self, why: object) -> None:
        """A call raised."""
        self._is_call_failing = True
        self.note_failure(why)

    def note_failure(self, why: object) -> None:
        """A job failed as a whole."""
        self._num_failures += 1
        if self.state is BreakerState.OK:
            if self._num_failures < self._num_failures_max:
                return
            self.num_opened += 1
            logger.warning(
                "%s: skipped for %.1f s at a time after %d failures in a row: %s",
                self._name,
                self._cooldown_s,
                self._num_failures,
                why,
            )
        self.state = BreakerState.OPEN
        self._rests_until_s = self._clock.now_s() + self._cooldown_s
