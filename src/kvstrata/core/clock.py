"""Time as something that is passed in, so that tests own it."""

import time
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
