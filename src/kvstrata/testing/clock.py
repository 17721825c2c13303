"""A clock that stands still until a test moves it."""


class FakeClock:
    """Both times of `Clock`; they move together and only by `advance`.

    `num_reads` counts how often somebody asked, so that a suite can tell whether it was used.
    """

    def __init__(self, now_s: float = 1_000.0, wall_s: float = 1_700_000_000.0) -> None:
        """Start at these times."""
        self._now_s = now_s
        self._wall_s = wall_s
        self.num_reads = 0

    def now_s(self) -> float:
        """Return monotonic time."""
        self.num_reads += 1
        return self._now_s

    def wall_s(self) -> float:
        """Return seconds since 1970."""
        self.num_reads += 1
        return self._wall_s

    def advance(self, by_s: float) -> None:
        """Let this much time pass, 0 or more."""
        if by_s < 0:
            raise ValueError(f"time does not go back, asked for {by_s} s")
        self._now_s += by_s
        self._wall_s += by_s
