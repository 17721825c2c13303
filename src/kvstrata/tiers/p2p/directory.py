"""A directory in Redis: which host has which chunk, for fleets too large to ask everyone.

Each host keeps a record of itself, its address and *edition*, under a lease that it renews. A
chunk's entry is a set of hosts, each with the edition under which it published the chunk. An entry
counts only while its host's record is there and names the same edition, so a host that died, or
that starts a new edition because it lost count, takes back all its entries with one write.
"""

import hashlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

from typing_extensions import override

from kvstrata.core.errors import ConfigError
from kvstrata.core.keys import OffloadKey
from kvstrata.tiers.p2p.settings import Address, parse_address
from kvstrata.tiers.p2p.shelf import ShelfListener

logger = logging.getLogger("kvstrata.p2p")

CHANGES_MAX: Final = 65_536  # not yet written; beyond it a new edition is begun
BATCH: Final = 1000
RECORD_S: Final = 1.0  # how long another host's record is believed
ENTRY_S: Final = 24 * 3600  # until Redis drops the entry of a chunk that nobody publishes again

Found = Callable[[Sequence[OffloadKey], "list[list[tuple[str, Address]]] | None", int], None]


class Directory(ShelfListener):
    """Publishes this host's chunks and finds those of others, each on a thread of its own.

    While Redis can't be reached nothing is found, and a new edition is published afterwards.

    Thread: any. Blocks: never, except `close`.
    """

    def __init__(
        self,
        client: Any,  # noqa: ANN401
        *,
        namespace: str,
        identity: str,
        address: Address | None,
        lease_s: float,
        found: Found,
    ) -> None:
        """Prepare; `start` begins.

        `client` is a `redis.Redis` with timeouts; hosts of different namespaces never meet;
        `address` is where others reach this host, None if it does not serve. `found` gets the hosts
        that have each key asked for, None where Redis did not answer.
        """
        self._client, self._identity, self._address = client, identity, address
        self._lease_s, self._found = lease_s, found
        self._prefix = f"kvstrata:{hashlib.sha256(namespace.encode()).hexdigest()[:32]}:"
        self._published: Callable[[], Iterable[OffloadKey]] = tuple
        self._changes: deque[tuple[OffloadKey, bool]] = deque()
        self._edition, self._is_stale = "", True
        self._records: dict[str, tuple[float, str, Address | None]] = {}
        self._questions: queue.SimpleQueue[tuple[Sequence[OffloadKey], int] | None] = (
            queue.SimpleQueue()
        )
        self._is_closed = threading.Event()
        work = [self._answer] if address is None else [self._answer, self._publish]
        self._threads = [threading.Thread(target=each, name="p2p-directory", daemon=True)
                         for each in work]  # fmt: skip

    def start(self, published: Callable[[], Iterable[OffloadKey]]) -> None:
        """Begin; `published` returns all that this host serves now."""
        self._published = published
        for thread in self._threads:
            thread.start()

    def close(self, timeout_s: float) -> None:
        """Take back this host's record and end the threads. Blocks: at most about `timeout_s`."""
        self._is_closed.set()
        self._questions.put(None)
        for thread in self._threads:
            thread.join(timeout_s)
        self._client.close()

    # What this host has

    @override
    def came(self, keys: Sequence[OffloadKey]) -> None:
        self._note([(key, True) for key in keys])

    @override
    def left(self, keys: Sequence[OffloadKey]) -> None:
        self._note([(key, False) for key in keys])

    def _note(self, changes: Sequence[tuple[OffloadKey, bool]]) -> None:
        """Have changes written within a second or so."""
        if self._address is not None:
            self._changes.extend(changes)
            if len(self._changes) > CHANGES_MAX:
                self._is_stale = True
                self._changes.clear()

    def _publish(self) -> None:
        renewed_s = -self._lease_s
        while not self._is_closed.wait(0.0 if self._changes else min(0.05, self._lease_s / 10)):
            is_due = time.monotonic() - renewed_s >= self._lease_s / 3
            if not (is_due or self._changes or self._is_stale):
                continue
            try:
                if is_due and not self._client.exists(self._record_key()):
                    self._is_stale = True  # Redis lost it: what else, nobody knows
                if self._is_stale:
                    self._publish_all()
                self._write_changes()
                self._renew()
                renewed_s = time.monotonic()
            except (OSError, self._failure()) as error:
                logger.debug("directory: %s", error)
                self._is_stale = True
                self._is_closed.wait(min(1.0, self._lease_s / 3))
        try:
            self._client.delete(self._record_key())
        except (OSError, self._failure()) as error:
            logger.debug("directory: %s", error)

    def _publish_all(self) -> None:
        """Begin an edition with all that is served; nothing of it counts before the record."""
        self._is_stale, edition = False, os.urandom(8).hex()
        keys = list(self._published())
        for start in range(0, len(keys), BATCH):
            self._write([(key, True) for key in keys[start : start + BATCH]], edition)
        self._edition = edition

    def _write_changes(self) -> None:
        while self._changes:
            batch: list[tuple[OffloadKey, bool]] = []
            with suppress(IndexError):  # taken away meanwhile, and a new edition asked for
                while len(batch) < BATCH:
                    batch.append(self._changes.popleft())
            self._write(batch, self._edition)

    def _write(self, changes: Sequence[tuple[OffloadKey, bool]], edition: str) -> None:
        member = f"{self._identity}\0{edition}"
        pipeline = self._client.pipeline(transaction=False)
        for key, is_here in changes:
            if is_here:
                pipeline.sadd(self._entry_key(key), member)
                pipeline.expire(self._entry_key(key), ENTRY_S)
            else:
                pipeline.srem(self._entry_key(key), member)
        pipeline.execute()

    def _renew(self) -> None:
        record = f"{self._edition} {self._address}"
        self._client.set(self._record_key(), record, px=int(self._lease_s * 1000))

    def _record_key(self, identity: str | None = None) -> str:
        return f"{self._prefix}host:{identity or self._identity}"

    def _entry_key(self, key: OffloadKey) -> bytes:
        return f"{self._prefix}chunk:".encode() + key

    # What others have

    def ask(self, keys: Sequence[OffloadKey], epoch: int) -> None:
        """Look for chunks; `found` is called with the answer and `epoch`."""
        self._questions.put((keys, epoch))

    @property
    def num_waiting(self) -> int:
        """Questions that nobody has taken up yet."""
        return self._questions.qsize()

    def _answer(self) -> None:
        while (question := self._questions.get()) is not None:
            keys, epoch = question
            try:
                holders = self._find(keys)
            except (OSError, self._failure()) as error:
                logger.debug("directory: %s", error)
                self._found(keys, None, epoch)
                continue
            self._found(keys, holders, epoch)

    def _find(self, keys: Sequence[OffloadKey]) -> list[list[tuple[str, Address]]]:
        members: list[set[bytes]] = []
        for start in range(0, len(keys), BATCH):
            pipeline = self._client.pipeline(transaction=False)
            for key in keys[start : start + BATCH]:
                pipeline.smembers(self._entry_key(key))
            members += pipeline.execute()
        named = [
            [text.decode(errors="replace").partition("\0")[::2] for text in each]
            for each in members
        ]
        self._refresh({identity for each in named for identity, _ in each} - {self._identity})
        return [
            [
                (identity, address)
                for identity, edition in each
                if (address := self._address_of(identity, edition)) is not None
            ]
            for each in named
        ]

    def _refresh(self, identities: Iterable[str]) -> None:
        now_s = time.monotonic()
        self._records = {i: record for i, record in self._records.items() if record[0] > now_s}
        missing = [identity for identity in identities if identity not in self._records]
        if not missing:
            return
        texts = self._client.mget([self._record_key(identity) for identity in missing])
        for identity, text in zip(missing, texts, strict=True):
            edition, _, where = (text or b"").decode(errors="replace").partition(" ")
            try:
                address = parse_address(where, "directory") if where else None
            except ConfigError:
                address = None
            self._records[identity] = now_s + RECORD_S, edition, address

    def _address_of(self, identity: str, edition: str) -> Address | None:
        record = self._records.get(identity)
        return None if record is None or record[1] != edition else record[2]

    @staticmethod
    def _failure() -> type[Exception]:
        from redis import RedisError  # noqa: PLC0415

        return RedisError


def connect_to_redis(url: str, timeout_s: float, path: str) -> Any:  # noqa: ANN401
    """Make a client; it connects when it is first used.

    Raises:
        ConfigError: The extra is not installed, or the address is none.
    """
    try:
        import redis  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(path, "needs the extra redis: pip install 'kvstrata[redis]'") from error
    try:
        return redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
    except ValueError as error:
        raise ConfigError(path, str(error)) from error
