"""The sessions with all peers: those of the settings, and those that a directory told of."""

import threading
from collections.abc import Callable, Sequence
from typing import Final

from kvstrata.core.clock import Clock
from kvstrata.tiers.p2p.handshake import Credentials
from kvstrata.tiers.p2p.session import Lane, Session
from kvstrata.tiers.p2p.settings import Address, P2pSettings

NUM_QUESTIONS_MAX: Final = 8  # waiting at one peer; a peer this far behind is not asked


class Fleet:
    """Peers by identity. Those met through a directory are bounded; the one unused longest goes.

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
        # Replaced, never changed: readers take no lock.
        self._static = {name: self._open(name, at) for name, at in settings.peers.items()}
        self._met: dict[str, Session] = {}

    def _open(self, name: str, address: Address) -> Session:
        return Session(
            name,
            address,
            own=self._own,
            settings=self._settings,
            clock=self._clock,
            on_change=self._on_change,
        )

    def get(self, name: str) -> Session | None:
        """Return the session with a peer, if there is one."""
        return self._static.get(name) or self._met.get(name)

    def sessions(self) -> list[Session]:
        """Return all sessions."""
        return [*self._static.values(), *self._met.values()]

    @property
    def static(self) -> Sequence[str]:
        """The peers of the settings."""
        return list(self._static)

    def is_up(self, name: str) -> bool:
        """Say whether the peer can be expected to answer."""
        session = self.get(name)
        return session is not None and session.is_up

    def is_ready(self, name: str) -> bool:
        """Say whether the peer is up and not far behind with its answers."""
        session = self.get(name)
        return (
            session is not None
            and session.is_up
            and session.num_waiting(Lane.CONTROL) < NUM_QUESTIONS_MAX
        )

    def meet(self, name: str, address: Address) -> None:
        """Open a session with a peer that a directory told of, in place of one that is elsewhere.

        One that is nowhere near being used gives way where there are too many.
        """
        session = self._met.get(name)
        if name in self._static or (session is not None and session.address == address):
            return
        with self._lock:
            if self._is_closed or name == self._own.identity:
                return
            kept = {n: s for n, s in self._met.items() if n != name}
            left = [session] if session is not None else []
            while len(kept) >= self._settings.num_met_max:
                oldest = min(kept, key=lambda n: kept[n].used_s)
                left.append(kept.pop(oldest))
            self._met = {**kept, name: self._open(name, address)}
            self._num_lost_before += sum(each.num_lost for each in left)
        for each in left:
            each.close(0.0)  # its threads end by themselves

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
