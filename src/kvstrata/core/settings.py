"""Read settings: sizes, times and names from a mapping into frozen dataclasses, here only."""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields
from enum import Enum
from typing import Any, Final, TypeVar

from kvstrata.core.errors import ConfigError

T = TypeVar("T")
Parse = Callable[[object, str], Any]

_BYTE_UNITS: Final = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_TIME_UNITS: Final = {
    "": 1.0,
    "MS": 1e-3,
    "S": 1.0,
    "M": 60.0,
    "MIN": 60.0,
    "H": 3600.0,
    "D": 86400.0,
}


def join(path: str, name: str) -> str:
    """Return the dotted path of a field below `path`."""
    return f"{path}.{name}" if path else name


def check_known(names: Iterable[str], known: Iterable[str], path: str) -> None:
    """Refuse names that are not known, with the nearest known one.

    Raises:
        ConfigError: At the first unknown name.
    """
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
            advice = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
            raise ConfigError(join(path, str(name)), f"unknown field, {advice}")


def _quantity(value: object, path: str, units: Mapping[str, float], example: str) -> float:
    number, unit = value, ""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].upper() not in units:
            raise ConfigError(path, f"can't read {value!r}; write it like {example}")
        number, unit = float(match[1]), match[2].upper()
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise ConfigError(path, f"can't read {value!r}; write it like {example}")
    if number < 0:
        raise ConfigError(path, f"must not be negative, is {value!r}")
    return number * units[unit]


def parse_bytes(value: object, path: str) -> int:
    """Read a size of at least one byte: a whole number, or text such as "20GiB" or "1.5GB"."""
    size = _quantity(value, path, _BYTE_UNITS, '"20GiB", "1.5GB" or 1048576')
    if size < 1:
        raise ConfigError(path, f"must be at least one byte, is {value!r}")
    return int(size)


def parse_seconds(value: object, path: str) -> float:
    """Read a time of 0 or more: a number of seconds, or text such as "500ms", "30s", "2h"."""
    return float(_quantity(value, path, _TIME_UNITS, '"500ms", "30s", "2h" or 1.5'))


def parse_share(value: object, path: str) -> float:
    """Read a share from 0 to 1: a number, or text such as "50%"."""
    text = value.strip() if isinstance(value, str) else value
    if isinstance(text, str) and text.endswith("%"):
        share = _quantity(text[:-1], path, {"": 1.0}, '"50%" or 0.5') / 100
    else:
        share = _quantity(text, path, {"": 1.0}, '"50%" or 0.5')
    if share > 1:
        raise ConfigError(path, f"must be at most 1 (100%), is {value!r}")
    return share


def parse_bool(value: object, path: str) -> bool:
    """Read true or false, also as text, as environment variables give it."""
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if not isinstance(value, bool):
        raise ConfigError(path, f"must be true or false, is {value!r}")
    return value


def parse_text(value: object, path: str) -> str:
    """Read a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ConfigError(path, f"must be a non-empty text, is {value!r}")
    return value


def parse_count(minimum: int = 1) -> Parse:
    """Return a reader of whole numbers from `minimum` on, also as text."""

    def parse(value: object, path: str) -> int:
        if isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]+\s*", value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(path, f"must be a whole number, {minimum} or more, is {value!r}")
        return value

    return parse


def parse_enum(kind: type[Enum]) -> Parse:
    """Return a reader of an enum's values."""

    def parse(value: object, path: str) -> Enum:
        try:
            return kind(value)
        except ValueError:
            known = ", ".join(str(member.value) for member in kind)
            raise ConfigError(path, f"must be one of {known}, is {value!r}") from None

    return parse


def optional(parse: Parse) -> Parse:
    """Return a reader that lets None through."""
    return lambda value, path: None if value is None else parse(value, path)


def setting(
    parse: Parse, default: object = ..., factory: Callable[[], object] | None = None
) -> Any:  # noqa: ANN401
    """Declare a dataclass field that `parse_settings` reads with `parse`."""
    metadata = {"parse": parse}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    if default is ...:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def parse_settings(kind: type[T], raw: object, path: str) -> T:
    """Make a settings dataclass from a mapping; an instance of it is returned as it is.

    Args:
        kind: A dataclass whose fields are declared with `setting`.
        raw: The mapping.
        path: Dotted path of the mapping, for errors; may be empty.

    Raises:
        ConfigError: A field is unknown, missing or out of range.
    """
    if isinstance(raw, kind):
        return raw
    if not isinstance(raw, Mapping):
        raise ConfigError(path, f"must be a table of settings, is {raw!r}")
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    check_known(raw, known, path)
    values = {
        name: known[name].metadata["parse"](value, join(path, name)) for name, value in raw.items()
    }
    try:
        return kind(**values)
    except TypeError as error:
        missing = [n for n in known if n not in values and f"'{n}'" in str(error)]
        raise ConfigError(join(path, missing[0] if missing else ""), "is required") from error


def table(kind: type[T]) -> Parse:
    """Return a reader of a nested settings table."""
    return lambda value, path: parse_settings(kind, value, path)
