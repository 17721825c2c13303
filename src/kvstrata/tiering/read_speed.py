"""How fast a tier reads: latency and rate, learned from its finished loads."""

from typing import Final

WEIGHT: Final = 0.8  # of what is known, each time a new load is learned from
AGE_S_MAX: Final = 30.0


class ReadSpeed:
    """Fits `seconds = latency + bytes / rate` to the latest loads.

    What was learned long ago is not held against a tier: then the answer is that it is not known,
    so that the next load is tried and measured.
    """

    def __init__(self) -> None:
        self._num = self._x = self._y = self._xx = self._xy = 0.0
        self._learned_s = 0.0
        self.latency_s = 0.0
        self.bytes_per_s = 0.0

    def learn(self, num_bytes: int, took_s: float, now_s: float) -> None:
        """Take one finished load in."""
        self._num = self._num * WEIGHT + 1.0
        self._x = self._x * WEIGHT + num_bytes
        self._y = self._y * WEIGHT + took_s
        self._xx = self._xx * WEIGHT + num_bytes * num_bytes
        self._xy = self._xy * WEIGHT + num_bytes * took_s
        self._learned_s = now_s
        spread = self._num * self._xx - self._x * self._x
        slope = (self._num * self._xy - self._x * self._y) / spread if spread > 0 else 0.0
        latency_s = (self._y - slope * self._x) / self._num
        if slope <= 0 or latency_s < 0:  # loads of one size, or noise: all of it is rate
            slope, latency_s = self._y / self._x, 0.0
        self.bytes_per_s = 1 / slope if slope > 0 else 0.0
        self.latency_s = latency_s

    def expected_s(self, num_bytes: int, now_s: float) -> float | None:
        """Return how long a load of so many bytes should take; None if that is not known."""
        if not self.bytes_per_s or now_s - self._learned_s > AGE_S_MAX:
            return None
        return self.latency_s + num_bytes / self.bytes_per_s
