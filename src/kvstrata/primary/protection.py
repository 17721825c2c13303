"""Chunks of preempted requests, kept until the request resumes, finishes, or time is up."""

from kvstrata.primary.request_state import RequestState
from kvstrata.primary.run_table import RunTable


class Protection:
    """Holds on the chunks of preempted requests, bounded in number and time.

    `until_s` holds the requests that are protected, with the end of it, in order of time.
    """

    def __init__(self, table: RunTable, num_max: int, duration_s: float) -> None:
        """Protect at most `num_max` chunks, and none for longer than `duration_s`."""
        self._table = table
        self._num_max = num_max
        self._duration_s = duration_s
        self.until_s: dict[RequestState, float] = {}  # in order of time
        self.num_chunks = 0

    def protect(self, state: RequestState, now_s: float) -> None:
        """Hold the resident chunks of a request, from the first on as far as there is room."""
        self.release(state)
        keys = [key for key in state.used_keys() if key in self._table]
        runs = self._table.resident_runs(keys[: self._num_max - self.num_chunks])
        state.protected = self._table.hold(runs)
        self.num_chunks += len(state.protected.keys)
        self.until_s[state] = now_s + self._duration_s

    def release(self, state: RequestState) -> None:
        """End the protection that the request has."""
        if state.protected is not None:
            del self.until_s[state]
            self.num_chunks -= len(state.protected.keys)
            self._table.unhold(state.protected)
            state.protected = None

    def expire(self, now_s: float) -> None:
        """End what has lasted long enough."""
        while self.until_s:
            state, until_s = next(iter(self.until_s.items()))
            if until_s > now_s:
                return
            self.release(state)

    def clear(self) -> None:
        """End all protection."""
        for state in list(self.until_s):
            self.release(state)
