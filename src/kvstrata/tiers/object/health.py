"""How the store is doing: failures counted by kind, one log line a minute for each, one word."""

import logging
import time
from collections import Counter
from math import inf
from typing import Final

from kvstrata.tiers.object.client import FailureKind, ObjectStoreError

logger = logging.getLogger("kvstrata.object")

_LOG_AGAIN_S: Final = 60.0
_WORDS: Final = {
    FailureKind.THROTTLED: "throttled",
    FailureKind.TIMEOUT: "timeouts",
    FailureKind.SERVER_ERROR: "unavailable",
    FailureKind.UNREACHABLE: "unavailable",
    FailureKind.CONNECTION: "unavailable",
    FailureKind.DENIED: "denied",
    FailureKind.UNKNOWN_KEY: "denied",
    FailureKind.BAD_SIGNATURE: "denied",
    FailureKind.NO_CREDENTIALS: "denied",
}
_OTHER: Final = "other_failures"


class Health:
    """Failures of requests. Not thread-safe."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter(dict.fromkeys([*_WORDS.values(), _OTHER], 0))
        self.state = "ok"
        self._logged_s: dict[FailureKind, float] = {}

    def failed(self, error: ObjectStoreError, doing: str) -> None:
        """Count a failed request, and log it unless its kind was logged within a minute."""
        self.state = _WORDS.get(error.kind, _OTHER)
        self.counters[self.state] += 1
        now_s = time.monotonic()
        if now_s - self._logged_s.get(error.kind, -inf) >= _LOG_AGAIN_S:
            self._logged_s[error.kind] = now_s
            logger.warning("%s, while %s; quiet about it for %.0f s", error, doing, _LOG_AGAIN_S)

    def answered(self) -> None:
        """Note that the store did what it was asked."""
        self.state = "ok"
