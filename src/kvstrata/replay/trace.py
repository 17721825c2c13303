"""Read request traces of several formats as a stream of timed requests, each a list of keys."""

import functools
import gzip
import heapq
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, TypeVar, cast

import msgspec
from typing_extensions import override

from kvstrata.core.errors import ConfigError
from kvstrata.core.keys import OffloadKey
from kvstrata.core.namespace import HashExtras, hash_blocks

_GROUP: Final = bytes(4)  # traces know one KV group
_BYTES_PER_TOKEN: Final = 4  # of text, where the log has no token ids
_TOKENS_PER_CHUNK: Final = 512
_UNREADABLE: Final = (
    *(ArithmeticError, AttributeError, LookupError, TypeError, ValueError),
    *(EOFError, OSError, zlib.error, msgspec.MsgspecError),
)
"""What a file raises that is not what its first lines promise."""


class TraceRequest(NamedTuple):
    """One request: when it arrives, the keys of its chunks from the root on, and their tokens.

    `is_partial`: the last chunk is not full, as engines never store it but some traces list it.
    """

    at_s: float
    keys: list[OffloadKey]
    num_tokens: int
    is_partial: bool


@dataclass(frozen=True, slots=True)
class Interleaving:
    """How the sessions of a session trace overlap: session k starts at `k * step_s`.

    Attributes:
        num_sessions: The first so many sessions that are long enough; None for all.
        step_s: Between the starts of two sessions.
        horizon_s: Requests after this time are left out; None for none.
        blocks_per_chunk: Recorded blocks that make up one chunk.
        num_requests_min: Sessions with fewer requests are left out.
    """

    num_sessions: int | None = None
    step_s: float = 60.0
    horizon_s: float | None = None
    blocks_per_chunk: int = 1
    num_requests_min: int = 5


class Trace(ABC):
    """A trace that can be read any number of times, each time as a stream of fresh key objects."""

    tokens_per_chunk: int

    @abstractmethod
    def requests(self) -> Iterator[TraceRequest]:
        """Yield the requests in order of arrival."""

    def count_distinct(self) -> int:
        """Return how many different chunks the trace holds; reads all of it, keeps all keys."""
        seen: set[OffloadKey] = set()
        for request in self.requests():
            seen.update(request.keys)
        return len(seen)


T = TypeVar("T", bound=Trace)


def _blaming_the_file(
    read: Callable[[T], Iterator[TraceRequest]],
) -> Callable[[T], Iterator[TraceRequest]]:
    """Make a ConfigError of whatever a file does to its reader, with the place."""

    @functools.wraps(read)
    def requests(self: T) -> Iterator[TraceRequest]:
        number = 0
        try:
            for number, request in enumerate(read(self), start=1):  # noqa: B007
                yield request
        except _UNREADABLE as error:
            problem = f"{type(error).__name__}: {error}"
            raise ConfigError("trace", f"can't read request {number + 1}: {problem}") from error

    return requests


def open_trace(
    path: Path, interleaving: Interleaving | None = None, tokens_per_chunk: int | None = None
) -> Trace:
    """Recognise the format of a trace file, plain or gzip.

    Args:
        path: JSON lines with `hash_ids` (Mooncake, Qwen Bailian), sessions, or prompts (text or
            token ids); or CSV with `ContextTokens` (Azure).
        interleaving: For session traces.
        tokens_per_chunk: For traces without hashes; default 512.

    Raises:
        ConfigError: The file can't be read or has none of these formats.
    """
    try:
        with _open(path) as file:
            first = file.readline()
            second = file.readline()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError("trace", f"can't read {path}: {error}") from error
    try:
        return _recognise(
            path,
            first,
            second,
            interleaving or Interleaving(),
            tokens_per_chunk or _TOKENS_PER_CHUNK,
        )
    except ConfigError:
        raise
    except _UNREADABLE as error:
        problem = f"{path} begins oddly: {type(error).__name__}: {error}"
        raise ConfigError("trace", problem) from error


def _recognise(
    path: Path, first: bytes, second: bytes, interleaving: Interleaving, tokens: int
) -> Trace:
    if not first.strip():
        raise ConfigError("trace", f"{path} is empty")
    if first.startswith(b"TIMESTAMP,"):
        return CountTrace(path, tokens)
    row = _decode(first, path)
    if "session" in row:
        return SessionTrace(path, row, interleaving)
    if "hash_ids" in row:
        return HashTrace(path, [row] + ([_decode(second, path)] if second.strip() else []))
    if row.keys() & {"prompt", "text", "messages", "token_ids", "prompt_token_ids"}:
        return PromptTrace(path, tokens)
    raise ConfigError("trace", f"{path} has no known format: its fields are {sorted(row)}")


def _open(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if is_gzip else path.open("rb")  # type: ignore[return-value]


def _decode(line: bytes, path: Path) -> dict[str, Any]:
    try:
        row = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError("trace", f"{path} is not JSON lines: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError("trace", f"{path}: a line is not an object")
    return row


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    decode = msgspec.json.Decoder().decode
    with _open(path) as file:
        for line in file:
            if not line.isspace():
                yield decode(line)


def _key_of(name: int | str) -> OffloadKey:
    """Name a chunk by an id of the trace, in as many bytes as a real key has."""
    if isinstance(name, int):
        return OffloadKey(name.to_bytes(32, "big", signed=name < 0) + _GROUP)
    return OffloadKey(blake2b(name.encode(), digest_size=32).digest() + _GROUP)


class HashTrace(Trace):
    """One JSON object a request, with the ids of its blocks; `timestamp` in ms, or s for Qwen's."""

    def __init__(self, path: Path, head: list[dict[str, Any]]) -> None:
        self._path = path
        self._per_second = 1.0 if "chat_id" in head[0] else 1000.0
        self.tokens_per_chunk = _infer_tokens_per_chunk(head)

    @override
    @_blaming_the_file
    def requests(self) -> Iterator[TraceRequest]:
        per_second, span = self._per_second, self.tokens_per_chunk
        for row in _rows(self._path):
            ids, num_tokens = row["hash_ids"], row.get("input_length", 0)
            if num_tokens < 0:
                raise ValueError(f"input_length is {num_tokens}")
            try:
                # As `_key_of` does, in one call a key: most of the time of reading goes here.
                keys = cast("list[OffloadKey]", [(name << 32).to_bytes(36, "big") for name in ids])
            except (TypeError, OverflowError):
                keys = [_key_of(name) for name in ids]
            is_partial = 0 < num_tokens < len(keys) * span
            yield TraceRequest(
                row.get("timestamp", 0) / per_second,
                keys,
                num_tokens or len(keys) * span,
                is_partial,
            )


def _infer_tokens_per_chunk(head: list[dict[str, Any]]) -> int:
    """Find the power of two that fits the lengths of the first requests; 512 if none does."""
    for span in (1 << power for power in range(16, 2, -1)):
        if all(
            len(row["hash_ids"]) == -(-row.get("input_length", 0) // span)
            for row in head
            if len(row["hash_ids"]) > 1
        ) and any(len(row["hash_ids"]) > 1 for row in head):
            return span
    return _TOKENS_PER_CHUNK


class _Session(NamedTuple):
    head: dict[str, Any]
    rows: list[dict[str, Any]]

    def keys(self, place: int, k: int, blocks_per_chunk: int) -> list[OffloadKey]:
        """Name the chunks of a request; a chunk is named by its last block, ids being chained."""
        tokens = self.head["block_size"]
        tools, system = self.head["tool_tokens"], self.head["system_tokens"]
        tools_end, system_end = tools // tokens, (tools + system) // tokens
        shared = _words(1, tools, 0), _words(2, tools, system), _words(3, k, 0)
        ids: list[int] = []
        for first, *last in self.rows[place]["h"]:
            ids += range(first, (last[0] if last else first) + 1)
        return [
            OffloadKey(
                shared[0 if i <= tools_end else 1 if i <= system_end else 2]
                + i.to_bytes(8, "big")
                + _GROUP
            )
            for i in ids[blocks_per_chunk - 1 :: blocks_per_chunk]
        ]


class SessionTrace(Trace):
    """Recorded sessions, interleaved; ids are local, but equal prefixes of tools are shared.

    The first `tool_tokens` of a session are those of all sessions with as many, the ones up to
    `tool_tokens + system_tokens` of all sessions with the same pair; the rest is its own. At most
    the sessions that overlap are in memory.
    """

    def __init__(self, path: Path, head: Mapping[str, Any], interleaving: Interleaving) -> None:
        self._path = path
        self._interleaving = interleaving
        self.tokens_per_chunk = head["block_size"] * interleaving.blocks_per_chunk

    @override
    @_blaming_the_file
    def requests(self) -> Iterator[TraceRequest]:
        how = self._interleaving
        horizon_s = float("inf") if how.horizon_s is None else how.horizon_s
        waiting: list[tuple[float, int, int, _Session]] = []
        sessions = enumerate(self._sessions())
        upcoming = next(sessions, None)
        while waiting or upcoming:
            while upcoming and (not waiting or upcoming[0] * how.step_s <= waiting[0][0]):
                k, session = upcoming
                if k * how.step_s > horizon_s:
                    upcoming = None
                    break
                heapq.heappush(waiting, (k * how.step_s + session.rows[0]["t"], k, 0, session))
                upcoming = next(sessions, None)
            if not waiting:
                return
            at_s, k, place, session = heapq.heappop(waiting)
            if place + 1 < len(session.rows):
                following_s = k * how.step_s + session.rows[place + 1]["t"]
                heapq.heappush(waiting, (following_s, k, place + 1, session))
            if at_s <= horizon_s and (keys := session.keys(place, k, how.blocks_per_chunk)):
                yield TraceRequest(at_s, keys, len(keys) * self.tokens_per_chunk, is_partial=False)

    def _sessions(self) -> Iterator[_Session]:
        """Yield the sessions that take part, each with its requests by time."""
        how, num_found = self._interleaving, 0
        for session in self._all_sessions():
            if len(session.rows) < how.num_requests_min:
                continue
            session.rows.sort(key=lambda row: row["t"])
            yield session
            num_found += 1
            if num_found == how.num_sessions:
                return

    def _all_sessions(self) -> Iterator[_Session]:
        session: _Session | None = None
        for row in _rows(self._path):
            if "session" in row:
                if session:
                    yield session
                session = _Session(row, [])
            elif session:
                session.rows.append(row)
        if session:
            yield session


def _words(*words: int) -> bytes:
    return b"".join(word.to_bytes(8, "big") for word in words)


class CountTrace(Trace):
    """Token counts only (Azure): every request's chunks are new, so it shows arrivals and sizes."""

    def __init__(self, path: Path, tokens_per_chunk: int) -> None:
        self._path = path
        self.tokens_per_chunk = tokens_per_chunk

    @override
    @_blaming_the_file
    def requests(self) -> Iterator[TraceRequest]:
        begin_s: float | None = None
        with _open(self._path) as file:
            next(file)
            for number, line in enumerate(file):
                stamp, context, *_ = line.decode().split(",")
                at_s = datetime.fromisoformat(stamp[:26]).timestamp()
                begin_s = at_s if begin_s is None else begin_s
                num_tokens = int(context)
                num_chunks = -(-num_tokens // self.tokens_per_chunk)
                head = _words(number, 0, 0)
                keys = [OffloadKey(head + i.to_bytes(8, "big") + _GROUP) for i in range(num_chunks)]
                is_partial = num_tokens % self.tokens_per_chunk > 0
                yield TraceRequest(at_s - begin_s, keys, num_tokens, is_partial)


class PromptTrace(Trace):
    """One JSON object a request with its prompt: token ids, or text counted as 4 bytes a token.

    Hashed as the connector hashes: `tenant`, `adapter` and `salt` of a row divide its keys.
    """

    def __init__(self, path: Path, tokens_per_chunk: int) -> None:
        self._path = path
        self.tokens_per_chunk = tokens_per_chunk

    @override
    @_blaming_the_file
    def requests(self) -> Iterator[TraceRequest]:
        span = self.tokens_per_chunk
        for number, row in enumerate(_rows(self._path)):
            tokens: Iterable[int] | None = row.get("token_ids") or row.get("prompt_token_ids")
            per_token = 1
            if tokens is None:
                tokens, per_token = _text_of(row).encode(), _BYTES_PER_TOKEN
            values = list(tokens)
            extras = HashExtras(
                adapter=row.get("adapter"), tenant=row.get("tenant"), salt=row.get("salt")
            )
            hashes = hash_blocks(values, span * per_token, extras)
            keys = [OffloadKey(block_hash + _GROUP) for block_hash in hashes]
            at_s = _seconds(row, number)
            yield TraceRequest(at_s, keys, len(values) // per_token, is_partial=False)


def _text_of(row: Mapping[str, Any]) -> str:
    messages = row.get("messages")
    if messages is not None:
        return "".join(f"<{m.get('role', '')}>{m.get('content', '')}" for m in messages)
    return str(row.get("prompt") or row.get("text") or "")


def _seconds(row: Mapping[str, Any], number: int) -> float:
    """Read a request's time: a number of seconds or an ISO date; one a second if there is none."""
    stamp = row.get("timestamp", row.get("time", row.get("t", number)))
    if isinstance(stamp, str):
        return datetime.fromisoformat(stamp).timestamp()
    return float(stamp)
