"""What an object tier can be told, and secrets that no text shows."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from typing_extensions import override

from kvstrata.core.errors import ConfigError
from kvstrata.core.settings import (
    join,
    optional,
    parse_bool,
    parse_bytes,
    parse_count,
    parse_enum,
    parse_seconds,
    parse_text,
    setting,
)

_URL: Final = re.compile(r"(?P<scheme>[a-z0-9+.-]+)://(?P<rest>[^?#]*)(?P<tail>.*)", re.DOTALL)
_BUCKET_SCHEMES: Final = ("s3", "gs", "az")
_ONLY_S3: Final = (*("endpoint", "region", "access_key_id", "secret_access_key", "session_token"),)
_LOCAL_MAX: Final = 8
_KEY_PAIR: Final = ("access_key_id", "secret_access_key")
_SCHEMES: Final = (*_BUCKET_SCHEMES, "file", "memory")


class Secret:
    """A text that is shown as `***` wherever it is printed."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text itself: for the client of the store and nobody else."""
        return self._text

    @override
    def __repr__(self) -> str:
        return "***"


class Addressing(Enum):
    """Where a request names the bucket."""

    PATH = "path"  # https://host/bucket/object
    VIRTUAL = "virtual"  # https://bucket.host/object; `endpoint`, if given, is the bucket's host


class ProbeMode(Enum):
    """What becomes of a store that can't be used when the tier starts."""

    REQUIRE = "require"  # a ConfigError
    WARN = "warn"  # one log line; the tier starts and its copies fail until the store answers
    SKIP = "skip"  # not asked


def _parse_secret(value: object, path: str) -> Secret:
    if isinstance(value, Secret):
        return value
    if not isinstance(value, str) or not value:
        raise ConfigError(path, "must be a non-empty text (its value is not shown)")
    return Secret(value)


def _parse_url(value: object, path: str) -> str:
    found = _URL.fullmatch(value) if isinstance(value, str) else None
    known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
    if found is None or found["scheme"] not in _SCHEMES:
        raise ConfigError(path, f"must begin with one of {known}")
    if "@" in found["rest"].partition("/")[0] or found["tail"]:
        raise ConfigError(
            path, "must hold no credentials and nothing after ? or #; see access_key_id and options"
        )
    if found["scheme"] in _BUCKET_SCHEMES and not found["rest"].partition("/")[0]:
        raise ConfigError(path, f"must name a bucket: {found['scheme']}://BUCKET/PREFIX")
    if found["scheme"] == "file" and not found["rest"].startswith("/"):
        raise ConfigError(path, "must hold an absolute path: file:///PATH")
    return f"{found['scheme']}://{found['rest'].rstrip('/')}"


def _parse_endpoint(value: object, path: str) -> str:
    text = parse_text(value, path)
    if not re.fullmatch(r"https?://[^\s@/?#]+(/[^\s@?#]*)?", text):
        raise ConfigError(path, "must be http://HOST:PORT or https://HOST:PORT")
    return text.rstrip("/")


def _parse_file(value: object, path: str) -> Path:
    file = Path(parse_text(value, path))
    if not file.is_file():
        raise ConfigError(path, f"there is no file {file}")
    return file


def _parse_options(value: object, path: str) -> Mapping[str, Secret]:
    if not isinstance(value, Mapping):
        raise ConfigError(path, "must be a table of obstore options (its values are not shown)")
    return {
        str(name): _parse_secret(_as_text(raw), join(path, name)) for name, raw in value.items()
    }


def _as_text(raw: object) -> object:
    if isinstance(raw, bool):
        return str(raw).lower()
    return str(raw) if isinstance(raw, int | float) else raw


@dataclass(frozen=True, slots=True)
class ObjectSettings:
    """Where the chunks go, how long anything may take, and how much may be in flight.

    Credentials that are not given come from the environment as the store's own tools read it.
    """

    url: str = setting(_parse_url)
    endpoint: str | None = setting(optional(_parse_endpoint), None)
    region: str | None = setting(optional(parse_text), None)
    addressing: Addressing = setting(parse_enum(Addressing), Addressing.PATH)
    ca_bundle: Path | None = setting(optional(_parse_file), None)  # PEM, on top of the system's
    access_key_id: Secret | None = setting(optional(_parse_secret), None)
    secret_access_key: Secret | None = setting(optional(_parse_secret), None)
    session_token: Secret | None = setting(optional(_parse_secret), None)
    anonymous: bool = setting(parse_bool, default=False)  # sign nothing
    options: Mapping[str, Secret] = setting(_parse_options, factory=dict)  # for obstore as they are
    probe: ProbeMode = setting(parse_enum(ProbeMode), ProbeMode.REQUIRE)
    read_only: bool = setting(parse_bool, default=False)  # stores are refused, nothing is removed

    max_bytes: int | None = setting(optional(parse_bytes), None)  # None: the store's own rules
    idle_s: float | None = setting(optional(parse_seconds), None)  # unused for longer: leaves
    relist_s: float = setting(parse_seconds, 600.0)  # how often others' objects are counted anew
    num_known_max: int = setting(parse_count(), 131_072)  # objects remembered as present

    num_requests_max: int = setting(parse_count(), 64)  # at one time; 8 at most without a network
    inflight_bytes_max: int = setting(parse_bytes, 256 * 2**20)
    num_queued_stores_max: int = setting(parse_count(), 1024)
    num_lookups_max: int = setting(parse_count(), 8192)

    connect_timeout_s: float = setting(parse_seconds, 2.0)
    request_timeout_s: float = setting(parse_seconds, 5.0)  # one request, with its body
    lookup_timeout_s: float = setting(parse_seconds, 2.0)  # then unknown counts as a miss
    load_timeout_s: float = setting(parse_seconds, 10.0)  # queue, tries and pauses together
    store_timeout_s: float = setting(parse_seconds, 30.0)  # no try begins after it
    num_tries: int = setting(parse_count(), 4)
    backoff_s: float = setting(parse_seconds, 0.1)  # doubled by each try, jittered
    backoff_s_max: float = setting(parse_seconds, 2.0)
    hedge_after_s: float | None = setting(optional(parse_seconds), None)  # ask a second time

    @property
    def scheme(self) -> str:
        """What the URL begins with."""
        return self.url.partition(":")[0]

    @property
    def bucket(self) -> str:
        """The bucket or container; empty for directories and memory."""
        has_bucket = self.scheme in _BUCKET_SCHEMES
        return self.url.partition("://")[2].partition("/")[0] if has_bucket else ""

    @property
    def num_threads_max(self) -> int:
        """Requests at one time. Where processors are what they wait for, more cost more."""
        if self.bucket:
            return self.num_requests_max
        num_local_max = (
            2 if self.scheme == "memory" else min(_LOCAL_MAX, len(os.sched_getaffinity(0)) + 1)
        )
        return min(self.num_requests_max, num_local_max)

    @property
    def cap_bytes(self) -> int | None:
        """The cap that this tier has to keep; None: none, or others keep it."""
        return None if self.read_only else self.max_bytes

    def check(self, object_bytes: int, path: str) -> None:
        """Check what more than one setting decides.

        Raises:
            ConfigError: A setting means nothing for such a URL, a credential lacks its other half,
                a timeout is 0, or a bound holds no object.
        """
        for name in _ONLY_S3 if self.bucket else (*_ONLY_S3, "options", "ca_bundle"):
            if self.scheme != "s3" and getattr(self, name):
                instead = "; see options" if self.bucket else ""
                raise ConfigError(join(path, name), f"means nothing for {self.scheme}://{instead}")
        if self.idle_s is not None and self.max_bytes is None:
            raise ConfigError(
                join(path, "idle_s"),
                "needs max_bytes: without it the store owns the capacity, so give the bucket a "
                "lifecycle rule that removes old objects",
            )
        for one, other in (_KEY_PAIR, _KEY_PAIR[::-1]):
            if getattr(self, one) is None and getattr(self, other) is not None:
                raise ConfigError(join(path, one), f"is required beside {other}")
        for name in ("request_timeout_s", "connect_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(join(path, name), "must be more than 0")
        for name in ("max_bytes", "inflight_bytes_max"):
            bound = getattr(self, name)
            if bound is not None and bound < object_bytes:
                raise ConfigError(
                    join(path, name),
                    f"{bound} bytes hold no object: one takes {object_bytes}, with its header",
                )
