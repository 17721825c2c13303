"""What a request and a step tell a manager: `ReqContext`, its hints, and `ScheduleEndContext`."""

import difflib
import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from typing_extensions import override

logger = logging.getLogger("kvstrata.hints")

HINTS_PARAM: Final = "kvstrata"
PRIORITY_DEFAULT: Final = 50
PRIORITY_MAX: Final = 100
NAME_CHARS_MAX: Final = 512


class ScheduleEndContext(NamedTuple):
    """What the step that ends now did: ids scheduled for the first time, and ids preempted."""

    new_req_ids: Collection[str]
    preempted_req_ids: Collection[str]


class SessionHint(Enum):
    """What the client knows of the request's session."""

    CONTINUES = "continues"  # more turns will come
    OVER = "over"


@dataclass(frozen=True, slots=True)
class RetentionRange:
    """Priority and lifetime for tokens `start` to `end` (exclusive; None: to the end)."""

    start: int
    end: int | None
    priority: int | None
    ttl_s: float | None


@dataclass(frozen=True, slots=True)
class RequestHints:
    """What a client asked for; section 5 of the design says who listens.

    `problems` holds one text per field that was unknown or bad; such a field keeps its default.
    """

    tenant: str | None = None
    priority: int = PRIORITY_DEFAULT
    ttl_s: float | None = None
    retention: tuple[RetentionRange, ...] = ()
    load_tiers: tuple[str, ...] | None = None
    store_tiers: tuple[str, ...] | None = None
    store: bool = True
    max_wait_s: float | None = None
    max_load_tokens: int | None = None
    peer: str | None = None
    park_for: str | None = None
    session: SessionHint | None = None
    problems: tuple[str, ...] = ()


NO_HINTS: Final = RequestHints()


class ReqContext:
    """One request; the same object goes into every call that concerns it.

    Not thread-safe and never changed after construction. Equality is identity.
    """

    __slots__ = ("hints", "kv_transfer_params", "req_id")

    req_id: str
    kv_transfer_params: Mapping[str, Any] | None
    hints: RequestHints

    def __init__(self, req_id: str, kv_transfer_params: Mapping[str, Any] | None = None) -> None:
        """Take the request's id and parameters, and parse its hints once.

        Args:
            req_id: The engine's id of the request.
            kv_transfer_params: As the engine received them; never changed. Hints are under
                `"kvstrata"`. A bad hint is logged and listed in `hints.problems`, not raised.
        """
        self.req_id = req_id
        self.kv_transfer_params = kv_transfer_params
        self.hints = NO_HINTS
        if kv_transfer_params and HINTS_PARAM in kv_transfer_params:
            self.hints = parse_hints(kv_transfer_params[HINTS_PARAM])
            for problem in self.hints.problems:
                logger.warning("request %s: %s", req_id, problem)

    @override
    def __repr__(self) -> str:
        return f"ReqContext({self.req_id!r})"


class _BadHintError(Exception):
    """A hint's value can't be used; the text says what would be."""


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _BadHintError("must be a non-empty text")
    if len(value) > NAME_CHARS_MAX:
        raise _BadHintError(f"is longer than {NAME_CHARS_MAX} characters")
    return value


def _priority(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= PRIORITY_MAX:
        raise _BadHintError(f"must be a whole number from 0 to {PRIORITY_MAX}")
    return value


def _seconds(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:  # type: ignore[arg-type, operator]
        raise _BadHintError("must be a number of seconds, 0 or more")
    return float(value)  # type: ignore[arg-type]


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _BadHintError("must be a whole number, 0 or more")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise _BadHintError("must be true or false")
    return value


def _names(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Collection) or isinstance(value, Mapping):
        raise _BadHintError("must be a list of tier names; [] means none")
    return tuple(_text(name) for name in value)


def _session(value: object) -> SessionHint:
    try:
        return SessionHint(value)
    except ValueError:
        raise _BadHintError('must be "continues" or "over"') from None


def _retention_range(value: object) -> RetentionRange:
    if not isinstance(value, Mapping) or not set(value) <= {"start", "end", "priority", "ttl_s"}:
        raise _BadHintError("entries must be {start, end, priority, ttl_s}")
    start = _count(value.get("start", 0))
    end = value.get("end")
    end = None if end is None else _count(end)
    if end is not None and end <= start:
        raise _BadHintError("an entry's end must be after its start")
    priority, ttl_s = value.get("priority"), value.get("ttl_s")
    return RetentionRange(
        start,
        end,
        None if priority is None else _priority(priority),
        None if ttl_s is None else _seconds(ttl_s),
    )


def _retention(value: object) -> tuple[RetentionRange, ...]:
    if isinstance(value, str | Mapping) or not isinstance(value, Collection):
        raise _BadHintError("must be a list of {start, end, priority, ttl_s}")
    return tuple(_retention_range(entry) for entry in value)


HINT_PARSERS: Final[Mapping[str, Callable[[object], object]]] = MappingProxyType(
    {
        "tenant": _text,
        "priority": _priority,
        "ttl_s": _seconds,
        "retention": _retention,
        "load_tiers": _names,
        "store_tiers": _names,
        "store": _flag,
        "max_wait_s": _seconds,
        "max_load_tokens": _count,
        "peer": _text,
        "park_for": _text,
        "session": _session,
    }
)


def parse_hints(raw: object) -> RequestHints:
    """Read the value under `kv_transfer_params["kvstrata"]`.

    Never raises: whatever can't be used is left at its default and described in `problems`.
    """
    if not isinstance(raw, Mapping):
        return RequestHints(problems=("hints must be a mapping; all were ignored",))
    fields: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in raw.items():
        parser = HINT_PARSERS.get(name) if isinstance(name, str) else None
        if parser is None:
            near = difflib.get_close_matches(str(name), HINT_PARSERS, n=1)
            advice = f", did you mean {near[0]}?" if near else ""
            problems.append(f"hint {name!r} is unknown and was ignored{advice}")
            continue
        if value is None:
            continue
        try:
            fields[name] = parser(value)
        except _BadHintError as error:
            problems.append(f"hint {name!r} was ignored: it {error}")
    return RequestHints(**fields, problems=tuple(problems))
