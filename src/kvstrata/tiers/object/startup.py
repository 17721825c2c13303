"""The probe at start: can this store be used, and if not, which setting is to blame."""

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, TypeVar

from kvstrata.core.errors import ConfigError
from kvstrata.core.settings import join
from kvstrata.tiers.object.client import FailureKind, ObjectClient, ObjectStoreError
from kvstrata.tiers.object.settings import Addressing, ObjectSettings, ProbeMode

T = TypeVar("T")

logger = logging.getLogger("kvstrata.object")

_NUM_TRIES: Final = 3
_OVERLOADED: Final = frozenset({FailureKind.TIMEOUT, FailureKind.THROTTLED})
"""What a store may answer that is there, and slow at first."""

_PROBE_BYTES: Final = b"kvstrata looks whether it may write here; this object can be deleted\n"


def probe_store(client: ObjectClient, settings: ObjectSettings, path: str) -> None:
    """List, write, read and delete one small object; with `read_only`, only list.

    Where the store overwrites although it was told to write only what is absent, the client looks
    first from then on, with one warning.

    Raises:
        ConfigError: It can't be used; the text names the setting. Not raised in modes WARN, SKIP.
    """
    if settings.probe is ProbeMode.SKIP:
        return
    try:
        _probe(client, settings, path)
    except ConfigError as error:
        if settings.probe is ProbeMode.REQUIRE:
            raise
        logger.warning("%s; starting all the same", error)


def _probe(client: ObjectClient, settings: ObjectSettings, path: str) -> None:
    name = f".probe/{os.urandom(8).hex()}"

    def attempt(doing: str, request: Callable[[], T], num_left: int = _NUM_TRIES - 1) -> T:
        try:
            return request()
        except ObjectStoreError as error:
            if num_left and error.kind in _OVERLOADED:
                return attempt(doing, request, num_left - 1)
            raise _blame(error, doing, settings, path) from None

    attempt("list", lambda: next(client.find(None, num_max=1), None))
    if settings.read_only:
        return
    try:
        attempt("write", lambda: client.create(name, (_PROBE_BYTES,)))
        if attempt("write", lambda: client.create(name, (_PROBE_BYTES,))):
            client.ask_before_writing()  # it overwrote what was there
        found = attempt("read", lambda: client.read(name, len(_PROBE_BYTES)))
        if found.tobytes() != _PROBE_BYTES:
            raise ConfigError(join(path, "url"), "what was written there is read back altered")
        if settings.max_bytes is not None:
            attempt("delete", lambda: client.delete([name]))
    finally:
        with suppress(ObjectStoreError):
            client.delete([name])


def _blame(error: ObjectStoreError, doing: str, settings: ObjectSettings, path: str) -> ConfigError:
    """Return an error that names the setting."""
    where = settings.endpoint or settings.url
    bucket = f"bucket {settings.bucket!r}" if settings.bucket else settings.url
    is_virtual = settings.addressing is Addressing.VIRTUAL
    home = f"; the store says {error.region!r}" if error.region else ""
    advice: Mapping[FailureKind, tuple[str, str]] = {
        FailureKind.NO_BUCKET: ("url", f"there is no {bucket} at {where}"),
        FailureKind.NOT_FOUND: ("url", f"there is no {bucket} at {where}"),
        FailureKind.NO_CREDENTIALS: (
            "access_key_id",
            "no credentials: set access_key_id and secret_access_key, or the store's environment "
            "variables, or anonymous = true",
        ),
        FailureKind.UNKNOWN_KEY: ("access_key_id", f"{where} does not know this key"),
        FailureKind.BAD_SIGNATURE: (
            "secret_access_key",
            f"{where} says that it does not belong to the access key",
        ),
        FailureKind.DENIED: (
            "access_key_id",
            f"the key is good, but has no permission to {doing} in {bucket}",
        ),
        FailureKind.WRONG_REGION: ("region", f"{settings.region!r} is not the bucket's{home}"),
        FailureKind.WRONG_ADDRESSING: (
            "addressing",
            f'{where} takes no requests of the style "{settings.addressing.value}"; try '
            + ('"path"' if is_virtual else '"virtual", with the bucket\'s own host as endpoint'),
        ),
        FailureKind.UNREACHABLE: ("endpoint", f"{where} can't be reached"),
        FailureKind.TIMEOUT: (
            "endpoint",
            f"{where} did not answer within request_timeout_s ({settings.request_timeout_s:g} s)",
        ),
        FailureKind.CONNECTION: ("endpoint", f"{where} broke the connection; is it http or https?"),
    }
    name, text = advice.get(error.kind, ("url", f"can't {doing} in {bucket}"))
    if is_virtual and error.kind in {FailureKind.NO_BUCKET, FailureKind.UNREACHABLE}:
        name = "addressing"
        text += '; it is "virtual", so endpoint must be the bucket\'s own host: try "path"'
    return ConfigError(join(path, name), f"{text} [{error}]")
