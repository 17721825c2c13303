"""Settings of the reference tier."""

from dataclasses import dataclass

from kvstrata.core.errors import ConfigError
from kvstrata.core.settings import optional, parse_bytes, parse_count, parse_seconds, setting


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """How much a memory tier keeps (the tighter of the two bounds holds), and for how long."""

    max_chunks: int = setting(parse_count(), 1024)
    max_bytes: int | None = setting(optional(parse_bytes), None)
    idle_s: float | None = setting(optional(parse_seconds), None)  # unused for longer: leaves

    def capacity(self, chunk_bytes: int, path: str) -> int:
        """Return how many chunks that are.

        Raises:
            ConfigError: `max_bytes` holds none.
        """
        if self.max_bytes is None:
            return self.max_chunks
        if self.max_bytes < chunk_bytes:
            raise ConfigError(
                f"{path}.max_bytes", f"{self.max_bytes} holds no chunk of {chunk_bytes} bytes"
            )
        return min(self.max_chunks, self.max_bytes // chunk_bytes)
