"""Whether stores are refused because the disk takes none: full, or read-only."""

import errno
import logging
from typing import Final

from kvstrata.core.clock import Clock

logger = logging.getLogger("kvstrata.fs")

_BLOCKING: Final = {errno.ENOSPC: "full", errno.EDQUOT: "full", errno.EROFS: "read_only"}


class Blockage:
    """A state and not an error storm: one line when it begins, one when it ends. Thread: any."""

    def __init__(self, name: str, clock: Clock, retry_s: float) -> None:
        """Start without; another try is worth it after `retry_s`."""
        self.state = ""
        self._name = name
        self._clock = clock
        self._retry_s = retry_s
        self._retry_at_s = 0.0

    def __bool__(self) -> bool:
        """Say whether stores are refused at this moment."""
        return bool(self.state) and self._clock.now_s() < self._retry_at_s

    def note_error(self, error: OSError) -> None:
        """Take in why a store failed."""
        state = _BLOCKING.get(error.errno or 0)
        if state is None:
            logger.warning("%s: can't store: %s", self._name, error)
        else:
            self.begin(state, str(error))

    def begin(self, state: str, reason: str) -> None:
        """Refuse stores until it is worth another try; say so the first time."""
        self._retry_at_s = self._clock.now_s() + self._retry_s
        if self.state != state:
            self.state = state
            logger.warning("%s: %s, stores are refused: %s", self._name, state, reason)

    def end(self) -> None:
        """Note that a store has succeeded."""
        if self.state:
            self.state = ""
            logger.warning("%s: stores succeed again", self._name)
