"""One peer as seen from here: its connections, what waits for them, and whether it lives."""

import logging
import queue
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import Final

from typing_extensions import override

from kvstrata.core.clock import Clock
from kvstrata.core.errors import ProtocolError, TierError
from kvstrata.tiers.p2p.handshake import Credentials, call
from kvstrata.tiers.p2p.settings import Address, P2pSettings
from kvstrata.tiers.p2p.transport import Channel, connect
from kvstrata.tiers.p2p.wire import Found, Lookup

logger = logging.getLogger("kvstrata.p2p")

BACKOFF_GROWTH: Final = 2.0


class Lane(Enum):
    """Which connections a task may use: answers never wait behind payload."""

    CONTROL = "control"
    PAYLOAD = "payload"


class CancelledTransferError(TierError):
    """The task's job was cancelled; nothing is wrong with the peer."""


class Task(ABC):
    """Something to be done over one connection; exactly one of `run` and `fail` ends it.

    After `fail`, or after `run` returned, it touches nothing any more.
    """

    lane: Lane = Lane.CONTROL
    is_probe: bool = False

    @abstractmethod
    def run(self, channel: Channel) -> None:
        """Do it, in a lane's thread. Raises OSError or TierError, and `fail` follows."""

    @abstractmethod
    def fail(self) -> None:
        """Give up: the peer is lost, or the session closed. Thread: a lane's. Blocks: never."""


class Probe(Task):
    """Find out whether a lost peer is back."""

    is_probe = True

    @override
    def run(self, channel: Channel) -> None:
        channel.send(Lookup([]))
        channel.receive(Found)

    @override
    def fail(self) -> None:
        pass


class Session:
    """All connections to one peer, one shared verdict on its health.

    What one connection learns holds for all: a peer that is lost has all its connections ended and
    all its tasks failed at once. It is probed when `tend` is called and its time has come.

    Thread: any. Blocks: `close` only.
    """

    def __init__(
        self,
        identity: str,
        address: Address,
        *,
        own: Credentials,
        settings: P2pSettings,
        clock: Clock,
        on_change: Callable[[str], None],
    ) -> None:
        """Start the threads; connect with the first task.

        `identity` is who is expected at the address. `on_change` is called with it, in any thread,
        when the peer was lost or came back as a new process: what is known of it is void.
        """
        self.identity, self.address = identity, address
        self.num_lost = 0
        self.used_s = clock.now_s()
        self._own, self._settings, self._clock = own, settings, clock
        self._on_change = on_change
        self._lock = threading.Lock()
        self._is_up, self._is_probing, self._is_closed = True, False, False
        self._retry_at_s, self._backoff_s = 0.0, settings.backoff_min_s
        self._generation: bytes | None = None
        self._channels: set[Channel] = set()
        self._queues: dict[Lane, queue.SimpleQueue[Task | None]] = {
            lane: queue.SimpleQueue() for lane in Lane
        }
        self._threads = self._start_threads()

    def _start_threads(self) -> list[threading.Thread]:
        lanes = [Lane.CONTROL] + [Lane.PAYLOAD] * self._settings.num_connections
        threads = [
            threading.Thread(target=self._work, args=(lane,), name=f"p2p-{lane.value}", daemon=True)
            for lane in lanes
        ]
        for thread in threads:
            thread.start()
        return threads

    @property
    def is_up(self) -> bool:
        """Whether the peer counts as alive; so it does until the contrary is known."""
        return self._is_up

    def num_waiting(self, lane: Lane) -> int:
        """Return the number of tasks that no connection has taken up yet."""
        return self._queues[lane].qsize()

    def submit(self, task: Task) -> None:
        """Queue a task; it fails soon where the peer is lost, and at once after `close`."""
        self.used_s = self._clock.now_s()
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._queues[task.lane].put(task)
        if is_closed:
            task.fail()

    def tend(self) -> None:
        """Probe the peer if it is lost and its time has come."""
        with self._lock:
            if self._is_up or self._is_probing or self._is_closed:
                return
            if self._clock.now_s() < self._retry_at_s:
                return
            self._is_probing = True
            self._queues[Lane.CONTROL].put(Probe())

    def close(self, timeout_s: float) -> None:
        """End all connections; queued tasks fail. Blocks: at most about `timeout_s`."""
        with self._lock:
            self._is_closed = True
            for lane, waiting in self._queues.items():
                for _ in range(self._settings.num_connections if lane is Lane.PAYLOAD else 1):
                    waiting.put(None)
            channels = list(self._channels)
        for channel in channels:
            channel.abort()
        for thread in self._threads:
            thread.join(timeout_s)

    def _work(self, lane: Lane) -> None:
        channel: Channel | None = None
        while True:
            try:
                task = self._queues[lane].get(timeout=self._settings.idle_timeout_s)
            except queue.Empty:
                self._discard(channel)
                channel = None
                continue
            if task is None:
                self._discard(channel)
                return
            try:
                channel = self._perform(task, channel)
            except Exception:
                logger.exception("a task for peer %s was given up", self.identity)
                channel = None
                task.fail()

    def _perform(self, task: Task, channel: Channel | None) -> Channel | None:
        """Run a task; return the connection if it can be used again."""
        if self._is_closed or not (self._is_up or task.is_probe):
            task.fail()
            return channel
        if channel is not None and channel not in self._channels:  # ended with the others
            channel.close()
            channel = None
        former, num_received_bytes = channel, 0 if channel is None else channel.num_received_bytes
        try:
            if channel is None:
                channel = self._connect()
            task.run(channel)
        except (OSError, TierError) as error:
            is_ours = channel is None or self._discard(channel)
            nothing_said = former is not None and former.num_received_bytes == num_received_bytes
            if nothing_said and isinstance(error, ConnectionError):
                return self._perform(task, None)  # it was closed while it was idle
            if is_ours and not isinstance(error, CancelledTransferError):
                self._lose(error, was_probe=task.is_probe)
            task.fail()
            return None
        except BaseException:  # a fault of our own; see `_work`
            self._discard(channel)
            raise
        self._find_alive()
        return channel

    def _connect(self) -> Channel:
        timeout_s = self._settings.connect_timeout_s
        sock = connect(self.address, timeout_s, self._own.calling_tls)
        channel = Channel(sock, f"peer {self.identity}", self._settings.silence_timeout_s)
        with self._lock:  # from now on it can be ended from other threads
            self._channels.add(channel)
            is_closed = self._is_closed
        if is_closed:
            self._discard(channel)
            raise ConnectionAbortedError("shutting down")
        try:
            channel.set_deadline(timeout_s)
            remote = call(channel, self._own, self.identity)
            channel.set_deadline(None)
        except BaseException:
            self._discard(channel)
            raise
        self._note_generation(channel, remote.generation)
        return channel

    def _note_generation(self, channel: Channel, generation: bytes) -> None:
        """If a connection leads to a new process, end those to the former one."""
        with self._lock:
            is_new = self._generation not in {None, generation}
            former = [other for other in self._channels if is_new and other is not channel]
            self._channels.difference_update(former)
            self._generation = generation
        for other in former:
            other.abort()
        if is_new:
            self._on_change(self.identity)

    def _discard(self, channel: Channel | None) -> bool:
        """Close a connection; False if it had been ended already, with the peer's loss."""
        if channel is None:
            return False
        with self._lock:
            was_ours = channel in self._channels
            self._channels.discard(channel)
        channel.close()
        return was_ours

    def _lose(self, error: Exception, *, was_probe: bool) -> None:
        """Take the peer for dead, on all its connections."""
        with self._lock:
            was_up, self._is_up = self._is_up, False
            if self._is_closed or not (was_up or was_probe):
                return
            self._is_probing = False
            if isinstance(error, ProtocolError):
                self._backoff_s = self._settings.backoff_max_s
            self._retry_at_s = self._clock.now_s() + self._backoff_s * random.uniform(0.5, 1.0)
            self._backoff_s = min(self._backoff_s * BACKOFF_GROWTH, self._settings.backoff_max_s)
            channels = list(self._channels)
            self._channels.clear()
            self.num_lost += was_up
        for other in channels:
            other.abort()
        if was_up:
            logger.warning("peer %s at %s is lost: %s", self.identity, self.address, error)
            self._on_change(self.identity)

    def _find_alive(self) -> None:
        """Take the peer for alive, after it has answered."""
        if self._is_up and self._backoff_s == self._settings.backoff_min_s:
            return
        with self._lock:
            was_up, self._is_up, self._is_probing = self._is_up, True, False
            self._backoff_s = self._settings.backoff_min_s
        if not was_up:
            logger.warning("peer %s at %s is back", self.identity, self.address)
