"""The p2p tier keeps what every tier promises, between two processes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from kvstrata.core.keys import OffloadKey
from kvstrata.core.memory import SlotView
from kvstrata.core.settings import parse_settings
from kvstrata.core.tier import SecondaryTierManager, TierEnv
from kvstrata.testing import ReadingTierSuite
from kvstrata.tiers.p2p import P2pTier
from kvstrata.tiers.p2p.nixl_plane import MODULES
from kvstrata.tiers.p2p.settings import P2pSettings
from tests.p2p_hosts import BASE, NAMESPACE, HostProcess, secret_file
from tests.p2p_tls import Authority

Security = dict[str, Any]
"""Settings of a host that say how it proves itself."""


def with_secret(folder: Path) -> tuple[Security, Security]:
    both = {"secret_file": secret_file(folder)}
    return both, both


def with_certificates(folder: Path) -> tuple[Security, Security]:
    authority = Authority(folder / "authority")
    return authority.settings("tested"), authority.settings("peer")


def with_nixl(folder: Path) -> tuple[Security, Security]:
    if not any(find_spec(name.partition(".")[0]) for name in MODULES):
        pytest.skip("needs nixl")
    both = {"secret_file": secret_file(folder), "payload": "nixl"}
    return both, both


class P2pConformance(ReadingTierSuite):
    """A tier that pulls from one other process, which serves what it is told to."""

    make_security: Callable[[Path], tuple[Security, Security]]
    """Returns the settings of the tested tier and of its peer."""

    @pytest.fixture(autouse=True)
    def _connect(self, peers: "Peers") -> Iterator[None]:
        self.security, self.peer = peers.get(type(self).make_security)
        self.stocked: list[OffloadKey] = []
        yield
        self.peer.evict(*self.stocked)

    @override
    def make_tier(self, slots: SlotView, tmp_path: Path) -> SecondaryTierManager:
        raw = {
            **BASE, **self.security,
            "identity": "tested", "peers": {"peer": self.peer.address},
        }  # fmt: skip
        env = TierEnv("p2p", NAMESPACE, self.clock, "tiers[0]")
        return P2pTier(slots, parse_settings(P2pSettings, raw, env.path), env)

    @override
    def stock(
        self, tier: SecondaryTierManager, slots: SlotView, chunks: Mapping[OffloadKey, int]
    ) -> None:
        self.peer.put(*chunks)
        self.stocked += chunks

    @override
    def held(self, tier: SecondaryTierManager) -> AbstractContextManager[object]:
        return self.peer.frozen()


class Peers:
    """One process for each way to be secure, started when it is first needed."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._started: dict[object, tuple[Security, HostProcess]] = {}

    def get(
        self, make_security: Callable[[Path], tuple[Security, Security]]
    ) -> tuple[Security, HostProcess]:
        if make_security not in self._started:
            tested, theirs = make_security(self._folder)
            peer = self._stack.enter_context(HostProcess("peer", listen="127.0.0.1:0", **theirs))
            self._started[make_security] = tested, peer
        return self._started[make_security]


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    with ExitStack() as stack:
        yield Peers(tmp_path_factory.mktemp("p2p"), stack)


class TestP2pTierWithSecret(P2pConformance):
    make_security = staticmethod(with_secret)


class TestP2pTierWithTls(P2pConformance):
    make_security = staticmethod(with_certificates)


class TestP2pTierWithNixl(P2pConformance):
    make_security = staticmethod(with_nixl)
