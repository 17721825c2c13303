"""How much a peer may ask for in a time."""

import threading

from kvstrata.core.clock import Clock


class Allowance:
    """Two budgets that refill: requests and bytes. Thread: any."""

    def __init__(
        self, clock: Clock, requests_per_s_max: float, bytes_per_s_max: float | None
    ) -> None:
        """Start full; each budget holds one second's worth. None: no limit on bytes."""
        self._clock = clock
        self._rates = (float(requests_per_s_max), bytes_per_s_max)
        self._lock = threading.Lock()
        self._num_requests = self._rates[0]
        self._num_bytes = bytes_per_s_max or 0.0
        self._refilled_s = clock.now_s()

    def take_request(self) -> bool:
        """Use one request of the budget; False where there is none left."""
        with self._lock:
            self._refill()
            if self._num_requests < 1:
                return False
            self._num_requests -= 1
            return True

    def take_bytes(self, num_bytes: int) -> bool:
        """Use so many bytes; False where the budget is used up.

        One answer may overdraw it and is paid for later, so that chunks larger than a second's
        worth pass too.
        """
        with self._lock:
            if self._rates[1] is None:
                return True
            self._refill()
            if self._num_bytes <= 0:
                return False
            self._num_bytes -= num_bytes
            return True

    def _refill(self) -> None:
        now_s = self._clock.now_s()
        age_s, self._refilled_s = now_s - self._refilled_s, now_s
        requests_max, bytes_max = self._rates
        self._num_requests = min(requests_max, self._num_requests + age_s * requests_max)
        if bytes_max is not None:
            self._num_bytes = min(bytes_max, self._num_bytes + age_s * bytes_max)
