"""Every exception that kvstrata raises."""


class OffloadError(Exception):
    """Base of all of them."""


class ConfigError(OffloadError, ValueError):
    """A setting is unknown, missing or out of range; the text starts with its dotted path."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


class ContractError(OffloadError):
    """The caller broke the order of calls: a bug in the caller, never caught here.

    The call that raised it changed nothing.
    """


class TierError(OffloadError):
    """One tier failed; the backend's own exception is `__cause__`."""

    def __init__(self, tier: str, message: str) -> None:
        super().__init__(f"{tier}: {message}")
        self.tier = tier


class TierUnavailableError(TierError):
    """The tier can't do it now and may later."""


class TierClosedError(TierError):
    """The tier was shut down."""


class CorruptChunkError(TierError):
    """Length, key or checksum of a stored chunk is not what it should be."""


class ProtocolError(TierError):
    """A peer's message is not accepted."""
