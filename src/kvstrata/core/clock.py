"""Time as something that is passed in, so that tests own it."""

import heapq
import time
from collections.abc import Callable
from itertools import repeat
from typing import Protocol


class Clock(Protocol):
    """Two times in seconds: one that never jumps and one that outlives the process."""

    def now_s(self) -> float:
        """Return monotonic time: for ages, deadlines and rates."""
        ...

    def wall_s(self) -> float:
        """Return seconds since 1970: for expiry times that are stored."""
        ...


class SystemClock:
    """The machine's own clocks."""

    __slots__ = ()

    now_s = staticmethod(time.monotonic)
    wall_s = staticmethod(time.time)


class VirtualClock:
    """Time that its owner sets, for replays; who needs a later moment leaves an alarm."""

    __slots__ = ("_alarms_s", "_at_s", "now_s", "wall_s")

    now_s: Callable[[], float]
    wall_s: Callable[[], float]

    def __init__(self) -> None:
        """Start at zero; wall time is the same, there is no calendar."""
        self.at_s = 0.0
        self._alarms_s: list[float] = []

    @property
    def at_s(self) -> float:
        """Seconds since the start; set by the owner."""
        return self._at_s

    @at_s.setter
    def at_s(self, at_s: float) -> None:
        self._at_s = at_s
        # Asked for as cheaply as the machine's clocks, which the caller's costs are measured with.
        self.now_s = self.wall_s = repeat(at_s).__next__

    def set_alarm(self, at_s: float) -> None:
        """Ask that the time stops at this moment on its way."""
        heapq.heappush(self._alarms_s, at_s)

    def take_alarm(self, until_s: float) -> float | None:
        """Return and forget the first moment that was asked for, if it is not after `until_s`."""
        if self._alarms_s and self._alarms_s[0] <= until_s:
            return heapq.heappop(self._alarms_s)
        return None
