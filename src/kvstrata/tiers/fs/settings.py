"""Settings of the file-system tier, parsed and checked."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from kvstrata.core.errors import ConfigError
from kvstrata.core.settings import (
    join,
    optional,
    parse_bool,
    parse_bytes,
    parse_count,
    parse_enum,
    parse_seconds,
    parse_settings,
    parse_text,
    setting,
)

logger = logging.getLogger("kvstrata.fs")

UNLIMITED: Final = "unlimited"


class DirectMode(Enum):
    """Whether files bypass the page cache."""

    AUTO = "auto"  # where the file system can; one warning where it can't
    ON = "on"  # or don't start
    OFF = "off"


class OnClose(Enum):
    """What becomes of this namespace's files at shutdown."""

    KEEP = "keep"
    DELETE = "delete"


class Sharing(Enum):
    """Whether chunks may appear that another process wrote, so that unknown keys are probed."""

    AUTO = "auto"  # while another process of this host uses the root
    YES = "yes"  # always: other hosts use it
    NO = "no"


def _parse_root(value: object, path: str) -> Path:
    return Path(parse_text(str(value) if isinstance(value, Path) else value, path))


def _parse_max_bytes(value: object, path: str) -> int | None:
    return None if value in {None, UNLIMITED} else parse_bytes(value, path)


def _parse_floor(value: object, path: str) -> int:
    return 0 if value in {0, "0"} else parse_bytes(value, path)


@dataclass(frozen=True, slots=True)
class FsSettings:
    """All settings of an `FsTier`; README and `kvstrata check` show them under these names."""

    root: Path = setting(_parse_root)
    max_bytes: int | None = setting(_parse_max_bytes, None)  # of the whole root; None: no limit
    min_free_bytes: int = setting(_parse_floor, 0)  # of the file system, for everybody else
    num_threads: int = setting(parse_count(), 8)  # that may store at a time; one more loads only
    direct: DirectMode = setting(parse_enum(DirectMode), DirectMode.AUTO)
    shared: Sharing = setting(parse_enum(Sharing), Sharing.AUTO)
    on_close: OnClose = setting(parse_enum(OnClose), OnClose.KEEP)
    io_deadline_s: float = setting(parse_seconds, 30.0)  # of one operation; then the tier is hung
    retry_s: float = setting(parse_seconds, 1.0)  # between tries to store while the disk is full
    refresh_s: float = setting(parse_seconds, 60.0)  # between looks at what is on disk
    idle_s: float | None = setting(optional(parse_seconds), None)  # unused for longer: leaves
    zero_removed: bool = setting(parse_bool, default=False)  # overwrite files before they go
    num_queued_chunks_max: int = setting(parse_count(), 65536)  # stores; more are refused

    def check(self, file_bytes: int, overhead_bytes: int, path: str) -> None:
        """Refuse settings that hold not even one chunk.

        Raises:
            ConfigError: They don't; the text names both sizes.
        """
        needed = file_bytes + overhead_bytes
        if self.max_bytes is not None and self.max_bytes < needed:
            raise ConfigError(
                join(path, "max_bytes"),
                f"{self.max_bytes} bytes hold no chunk: a file of {file_bytes} bytes "
                f"and {overhead_bytes} bytes of accounts need {needed}",
            )


def parse_fs_settings(raw: Mapping[str, Any], path: str) -> FsSettings:
    """Read the settings of a constructor call: without `max_bytes` there is a warning."""
    if "max_bytes" not in raw:
        logger.warning("%s: no max_bytes, so the directory may grow without limit", path)
    return parse_settings(FsSettings, raw, path)


def require_max_bytes(raw: Mapping[str, Any], path: str) -> None:
    """Refuse a configuration that says nothing about the size of the directory.

    Raises:
        ConfigError: `max_bytes` is missing.
    """
    if "max_bytes" not in raw:
        raise ConfigError(
            join(path, "max_bytes"), f'is required: a size such as "500GiB", or "{UNLIMITED}"'
        )
