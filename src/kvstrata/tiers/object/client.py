"""One bucket or directory through obstore: whole chunks in and out, failures sorted by kind."""

import errno
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum
from typing import Any, Final, Literal, NamedTuple

try:
    from obstore import delete, get, put
    from obstore import list as list_objects
    from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError
    from obstore.store import from_url
except ImportError as error:
    raise ImportError("obstore is missing: install kvstrata[object]") from error

from kvstrata.core.errors import ConfigError, TierError
from kvstrata.core.settings import join
from kvstrata.tiers.object.settings import Addressing, ObjectSettings, Secret

logger = logging.getLogger("kvstrata.object")

_ENDPOINT_VARIABLES: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>(\w{1,64})</Code>")
_REGION: Final = re.compile(r"<Region>([\w-]{1,32})</Region>")
_LIST_BATCH: Final = 1000


class FailureKind(Enum):
    """Why the store did not do what it was asked."""

    EXISTS = "object exists"
    NOT_FOUND = "no such object"
    WRONG_SIZE = "object has another size"
    NO_BUCKET = "no such bucket"
    NO_CREDENTIALS = "no credentials"
    UNKNOWN_KEY = "access key not known"
    BAD_SIGNATURE = "secret does not fit the access key"
    DENIED = "no permission"
    WRONG_REGION = "wrong region"
    WRONG_ADDRESSING = "bucket named in the wrong place"
    NOT_SUPPORTED = "not supported by the store"
    THROTTLED = "throttled"
    SERVER_ERROR = "server error"
    UNREACHABLE = "unreachable"
    TIMEOUT = "timed out"
    CONNECTION = "connection broke"
    OTHER = "failed"


RETRIED: Final = frozenset(
    {
        FailureKind.THROTTLED,
        FailureKind.SERVER_ERROR,
        FailureKind.UNREACHABLE,
        FailureKind.TIMEOUT,
        FailureKind.CONNECTION,
    }
)
"""Kinds that may pass by themselves; the others need a person or say all there is to say."""

_BY_CODE: Final[Mapping[str, FailureKind]] = {
    "NoSuchBucket": FailureKind.NO_BUCKET,
    "InvalidBucketName": FailureKind.NO_BUCKET,
    "ContainerNotFound": FailureKind.NO_BUCKET,
    "InvalidAccessKeyId": FailureKind.UNKNOWN_KEY,
    "InvalidToken": FailureKind.UNKNOWN_KEY,
    "ExpiredToken": FailureKind.UNKNOWN_KEY,
    "SignatureDoesNotMatch": FailureKind.BAD_SIGNATURE,
    "AuthenticationFailed": FailureKind.BAD_SIGNATURE,
    "AccessDenied": FailureKind.DENIED,
    "AuthorizationHeaderMalformed": FailureKind.WRONG_REGION,
    "IllegalLocationConstraintException": FailureKind.WRONG_REGION,
    "PermanentRedirect": FailureKind.WRONG_REGION,
    "SecondLevelDomainForbidden": FailureKind.WRONG_ADDRESSING,
    "PathStyleDomainForbidden": FailureKind.WRONG_ADDRESSING,
    "VirtualHostDomainRequired": FailureKind.WRONG_ADDRESSING,
    "InvalidPathAccess": FailureKind.WRONG_ADDRESSING,
    "NotImplemented": FailureKind.NOT_SUPPORTED,
    "SlowDown": FailureKind.THROTTLED,
    "ServerBusy": FailureKind.THROTTLED,
}
_BY_STATUS: Final[Mapping[int, FailureKind]] = {
    301: FailureKind.WRONG_REGION,
    401: FailureKind.UNKNOWN_KEY,
    403: FailureKind.DENIED,
    404: FailureKind.NOT_FOUND,
    416: FailureKind.WRONG_SIZE,
    429: FailureKind.THROTTLED,
    501: FailureKind.NOT_SUPPORTED,
    503: FailureKind.THROTTLED,
}
# Paths of the machine's metadata service, the last place where credentials are looked for.
_OF_METADATA_SERVICE: Final = ("/latest/api/token", "/latest/meta-data/", "/computeMetadata/")
# In order: what obstore says when no answer came that has a status.
_BY_TEXT: Final = (
    ("redirect without LOCATION", FailureKind.WRONG_REGION),
    ("StartTooLarge", FailureKind.WRONG_SIZE),
    ("kind: Connect", FailureKind.UNREACHABLE),
    ("kind: Timeout", FailureKind.TIMEOUT),
    ("TimedOut", FailureKind.TIMEOUT),
    ("HttpError", FailureKind.CONNECTION),
    ("reqwest::Error", FailureKind.CONNECTION),
)


class ObjectStoreError(TierError):
    """The store failed. It carries nothing of the store's own text, which may hold credentials."""

    def __init__(self, tier: str, kind: FailureKind, code: str = "", region: str = "") -> None:
        super().__init__(tier, kind.value + (f" ({code})" if code else ""))
        self.kind = kind
        self.region = region  # where the store says that the bucket is


class Found(NamedTuple):
    """One object of a listing; `modified_s` is in seconds since 1970."""

    path: str
    num_bytes: int
    modified_s: float


def sort_failure(tier: str, error: Exception) -> ObjectStoreError:
    """Return what an exception of obstore means."""
    text = str(error)
    code = match[1] if (match := _CODE.search(text)) else ""
    status = int(match[1]) if (match := _STATUS.search(text)) else 0
    region = match[1] if (match := _REGION.search(text)) else ""
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status)
    if any(part in text for part in _OF_METADATA_SERVICE):
        kind = FailureKind.NO_CREDENTIALS
    if kind is None and status >= 500:
        kind = FailureKind.SERVER_ERROR
    if isinstance(error, AlreadyExistsError):
        kind = FailureKind.EXISTS
    if kind is None and isinstance(error, FileNotFoundError):
        kind = FailureKind.NOT_FOUND
    if kind is None and isinstance(error, NotSupportedError):
        kind = FailureKind.NOT_SUPPORTED
    if kind is None and isinstance(error, PermissionError):
        kind = FailureKind.DENIED
    if isinstance(error, OSError) and error.errno is not None:
        code = code or errno.errorcode.get(error.errno, "")
    if kind is None and not status:
        kind = next((kind for part, kind in _BY_TEXT if part in text), None)
    return ObjectStoreError(
        tier, kind or FailureKind.OTHER, code or (f"HTTP {status}" if status else ""), region
    )


class ObjectClient:
    """Requests to one store; each blocks its thread, for at most the request timeout on a network.

    Every method raises ObjectStoreError and nothing else. Threads: any number.
    """

    def __init__(self, settings: ObjectSettings, tier: str, path: str) -> None:
        """Prepare, asking nothing yet.

        Raises:
            ConfigError: obstore refuses a setting.
        """
        self.is_conditional = True  # whether the store can write "only if absent"
        self._tier = tier
        self._store: Any = open_store(settings, path)

    def create(self, path: str, parts: Sequence[bytes | memoryview]) -> bool:
        """Write an object of these parts, in one request, unless it is there; say whether written.

        The parts are read until this returns. A reader sees all of the object or nothing.
        """
        if self.is_conditional:
            try:
                self._put(path, parts, mode="create")
            except ObjectStoreError as error:
                if error.kind is FailureKind.EXISTS:
                    return False
                if error.kind is not FailureKind.NOT_SUPPORTED:
                    raise
                self.ask_before_writing()
            else:
                return True
        if self.size_of(path) is not None:
            return False
        self._put(path, parts, mode="overwrite")
        return True

    def _put(
        self, path: str, parts: Sequence[bytes | memoryview], mode: Literal["create", "overwrite"]
    ) -> None:
        body = parts[0] if len(parts) == 1 else list(parts)  # a list costs more than its one part
        with self._sorted():
            put(self._store, path, body, mode=mode, use_multipart=False)

    def ask_before_writing(self) -> None:
        """From now on look for an object before it is written: the store has no other way."""
        if self.is_conditional:
            self.is_conditional = False
            logger.warning(
                "%s: the store can't write only what is absent; asking before each write",
                self._tier,
            )

    def size_of(self, path: str) -> int | None:
        """Return the size of an object; None if there is none."""
        try:
            with self._sorted():
                found = get(self._store, path, options={"head": True})
                return int(found.meta["size"])
        except ObjectStoreError as error:
            if error.kind is FailureKind.NOT_FOUND:
                return None
            raise

    def read(self, path: str, num_bytes: int) -> memoryview:
        """Return an object of exactly this size; one of another size is an error."""
        with self._sorted():
            found = get(self._store, path)
            if found.meta["size"] != num_bytes:
                raise ObjectStoreError(self._tier, FailureKind.WRONG_SIZE)
            return memoryview(found.bytes())

    def read_start(self, path: str, num_bytes: int, total_bytes: int) -> memoryview:
        """Return the first bytes of an object that has `total_bytes` in all."""
        with self._sorted():
            found = get(self._store, path, options={"range": (0, num_bytes)})
            if found.meta["size"] != total_bytes:
                raise ObjectStoreError(self._tier, FailureKind.WRONG_SIZE)
            return memoryview(found.bytes())

    def find(self, prefix: str | None, num_max: int | None = None) -> Iterator[Found]:
        """Yield objects whose path begins with the directories of `prefix`, in no order."""
        with self._sorted():
            batch = _LIST_BATCH if num_max is None else num_max
            for objects in list_objects(self._store, prefix, chunk_size=batch):
                for meta in objects:
                    modified_s = meta["last_modified"].timestamp()
                    yield Found(str(meta["path"]), int(meta["size"]), modified_s)
                if num_max is not None:
                    return

    def delete(self, paths: Sequence[str]) -> None:
        """Remove objects; those that are not there count as removed."""
        try:
            with self._sorted():
                delete(self._store, list(paths))
        except ObjectStoreError as error:
            if error.kind is not FailureKind.NOT_FOUND:
                raise
            if len(paths) > 1:  # the store stopped at one that was missing
                for path in paths:
                    self.delete([path])

    @contextmanager
    def _sorted(self) -> Iterator[None]:
        try:
            yield
        except ObjectStoreError:
            raise
        except (BaseError, OSError, ValueError) as error:
            raise sort_failure(self._tier, error) from None


def open_store(settings: ObjectSettings, path: str) -> object:
    """Return obstore's client; its own repetition is off, since this tier repeats, and counts."""
    config: Any = {name: secret.reveal() for name, secret in settings.options.items()}
    if settings.scheme == "s3":
        config |= _s3_config(settings)
    elif settings.anonymous:
        config["skip_signature"] = "true"
    local: dict[str, Any] = {"mkdir": True} if settings.scheme == "file" else {}
    url = f"{settings.url}/" if settings.scheme == "memory" else settings.url
    try:
        if not settings.bucket:
            return from_url(url, **local)
        options: Any = _client_options(settings)
        return from_url(url, config=config, client_options=options, retry_config={"max_retries": 0})
    except (BaseError, OSError, ValueError) as error:
        bundle = settings.ca_bundle
        is_about_it = bundle and ("ertificate" in str(error) or str(bundle) in str(error))
        where = join(path, "ca_bundle") if is_about_it else path
        raise ConfigError(where, _refusal(error, settings)) from None


def _refusal(error: Exception, settings: ObjectSettings) -> str:
    text = str(error).partition("\n")[0]
    pair = (settings.access_key_id, settings.secret_access_key, settings.session_token)
    for secret in (*settings.options.values(), *pair):
        if secret is not None:
            text = text.replace(secret.reveal(), "***")
    return f"{settings.scheme}:// can't be opened: {text}"


def _s3_config(settings: ObjectSettings) -> dict[str, str]:
    is_virtual = settings.addressing is Addressing.VIRTUAL
    config = {"virtual_hosted_style_request": str(is_virtual).lower()}
    if settings.anonymous:
        config["skip_signature"] = "true"
    for name in ("endpoint", "region", "access_key_id", "secret_access_key", "session_token"):
        given: str | Secret | None = getattr(settings, name)
        if given is not None:
            config[name] = given.reveal() if isinstance(given, Secret) else given
    return config


def _client_options(settings: ObjectSettings) -> dict[str, object]:
    endpoint = settings.endpoint or next(
        (os.environ[name] for name in _ENDPOINT_VARIABLES if os.environ.get(name)), ""
    )
    options: dict[str, object] = {
        "timeout": timedelta(seconds=settings.request_timeout_s),
        "connect_timeout": timedelta(seconds=settings.connect_timeout_s),
        "allow_http": endpoint.startswith("http://"),
    }
    if settings.ca_bundle:
        options["root_certificate"] = settings.ca_bundle.read_bytes()
    return options
