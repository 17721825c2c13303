"""The sessions with all peers: those of the settings, and those that a directory told of."""

import threading
from collections.abc import Callable, Sequence
from typing import Final

from kvstrata.core.clock import Clock
from kvstrata.tiers.p2p.handshake import Credentials
from kvstrata.tiers.p2p.session import Lane, Session, Task
from kvstrata.tiers.p2p.settings import Address, P2pSettings

NUM_KNOWN_MAX: Final = 65_536  # addresses that a directory told of
NUM_QUESTIONS_MAX: Final = 8  # waiting at one peer; a peer this far behind is not asked


class Fleet:
    """Peers by identity: those of the settings, and those that a directory told of.

    With the latter a session is opened when one is needed; their number is bounded, and the one
    unused longest gives way.

    Thread: any. Blocks: for a short lock; `close` as it says.
    """

    def __init__(
        self,
        own: Credentials,
        settings: P2pSettings,
        clock: Clock,
        on_change: Callable[[str], None],
    ) -> None:
        """Open sessions with the peers of the settings; `on_change` is as for `Session`."""
        self._own, self._settings, self._clock = own, settings, clock
        self._on_change = on_change
        self._lock = threading.Lock()
        self._is_closed = False
        self._num_lost_before = 0
        self._static = {name: self._open(name, at) for name, at in settings.peers.items()}
        self._known: dict[str, Address] = {}
        self._met: dict[str, Session] = {}  # replaced, never changed: readers take no lock

    def _open(self, name: str, address: Address) -> Session:
        return Session(
            name,
            address,
            own=self._own,
            settings=self._settings,
            clock=self._clock,
            on_change=self._on_change,
        )

    @property
    def static(self) -> Sequence[str]:
        """The peers of the settings."""
        return list(self._static)

    def sessions(self) -> list[Session]:
        """Return all open sessions."""
        return [*self._static.values(), *self._met.values()]

    def is_up(self, name: str) -> bool:
        """Say whether the peer can be expected to answer."""
        session = self._static.get(name) or self._met.get(name)
        return name in self._known if session is None else session.is_up

    def num_waiting(self, name: str, lane: Lane) -> int:
        """Return how many tasks wait for a connection to the peer."""
        session = self._static.get(name) or self._met.get(name)
        return 0 if session is None else session.num_waiting(lane)

    def meet(self, name: str, address: Address) -> None:
        """Note where a peer is; a session with it that leads elsewhere is ended."""
        if name in self._static or name == self._own.identity:
            return
        with self._lock:
            self._known.pop(name, None)
            self._known[name] = address
            while len(self._known) > NUM_KNOWN_MAX:
                del self._known[next(iter(self._known))]
            session = self._met.get(name)
            if session is not None and session.address != address:
                self._end(name)

    def submit(self, name: str, task: Task) -> None:
        """Have a task done with the peer; it fails at once where nothing is known of it."""
        session = self._static.get(name) or self._met.get(name)
        if session is None:
            with self._lock:
                session = self._met.get(name) or self._reach(name)
        if session is None:
            task.fail()
        else:
            session.submit(task)

    def _reach(self, name: str) -> Session | None:
        address = self._known.get(name)
        if address is None or self._is_closed:
            return None
        while len(self._met) >= self._settings.num_met_max:
            self._end(min(self._met, key=lambda other: self._met[other].used_s))
        session = self._open(name, address)
        self._met = {**self._met, name: session}
        return session

    def _end(self, name: str) -> None:
        session = self._met[name]
        self._met = {other: each for other, each in self._met.items() if other != name}
        self._num_lost_before += session.num_lost
        session.close(0.0)  # its threads end by themselves

    def tend(self) -> None:
        """Probe those lost peers whose time has come."""
        for session in self.sessions():
            session.tend()

    @property
    def num_lost(self) -> int:
        """How often a peer was taken for dead."""
        return self._num_lost_before + sum(session.num_lost for session in self.sessions())

    def close(self, timeout_s: float) -> None:
        """Close all sessions. Blocks: at most about `timeout_s`."""
        with self._lock:
            self._is_closed = True
        for session in self.sessions():
            session.close(0.0)
        for session in self.sessions():
            session.close(timeout_s)
