"""The settings of the p2p tier, and what of them can't stand together."""

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from typing_extensions import override

from kvstrata.core.errors import ConfigError
from kvstrata.core.settings import (
    join,
    optional,
    parse_bytes,
    parse_count,
    parse_enum,
    parse_seconds,
    parse_text,
    setting,
    table,
)
from kvstrata.tiers.p2p.shelf import ShelfLimits

SECRET_BYTES_MIN: Final = 16
IDENTITY_CHARS_MAX: Final = 128


class Address(NamedTuple):
    """Where a host listens."""

    host: str
    port: int

    @override
    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Say whether this name or address reaches only the host itself."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Say whether this address means every interface of a host, and so names none."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def parse_address(value: object, path: str) -> Address:
    """Read "host:port" or "[v6 address]:port"; port 0, for listening, takes a free one."""
    host, _, port = parse_text(value, path).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(path, f'must be "host:port", is {value!r}')
    return Address(host, int(port))


def parse_advertised(value: object, path: str) -> Address:
    """Read the address that others are told; it has to lead them here."""
    address = parse_address(value, path)
    if is_wildcard(address.host) or is_loopback(address.host) or not address.port:
        raise ConfigError(
            path,
            f"{value!r} does not lead other hosts here; "
            "give the address and port that they reach this host under",
        )
    return address


def parse_identity(value: object, path: str) -> str:
    """Read a host's name in the fleet."""
    text = parse_text(value, path)
    if is_wildcard(text) or is_loopback(text):
        raise ConfigError(
            path, f"{text!r} would be every host's name; give a name that no other host has"
        )
    if len(text) > IDENTITY_CHARS_MAX or not text.isprintable():
        raise ConfigError(path, f"must be at most {IDENTITY_CHARS_MAX} printable characters")
    return text


def _parse_peers(value: object, path: str) -> Mapping[str, Address]:
    if not isinstance(value, Mapping):
        raise ConfigError(path, 'must be a table of addresses by identity: {host-b = "host:port"}')
    return MappingProxyType(
        {
            parse_identity(name, join(path, str(name))): parse_address(raw, join(path, str(name)))
            for name, raw in value.items()
        }
    )


def default_identity() -> str:
    """Return this host's name, or one of its own where that is as good as none."""
    name = socket.gethostname()
    return name if name and not is_loopback(name) else f"host-{os.urandom(4).hex()}"


def default_num_connections() -> int:
    """Return how many connections for payload this host's processors can keep busy."""
    return min(4, len(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Files in PEM. The certificate must name this host's identity (subjectAltName, DNS)."""

    certificate: str = setting(parse_text)
    key: str = setting(parse_text)
    authority: str = setting(parse_text)  # who signs the certificates of all hosts


class Payload(Enum):
    """How payload travels. NIXL's own traffic is not authenticated: for closed networks."""

    TCP = "tcp"
    NIXL = "nixl"


@dataclass(frozen=True, slots=True)
class P2pSettings:
    """Settings of the p2p tier; limits named per peer hold for all its connections together."""

    identity: str = setting(parse_identity, factory=default_identity)  # unique in the fleet
    listen: Address | None = setting(optional(parse_address), None)  # None: only pull
    advertise: Address | None = setting(optional(parse_advertised), None)
    peers: Mapping[str, Address] = setting(_parse_peers, factory=lambda: MappingProxyType({}))
    directory: str | None = setting(optional(parse_text), None)  # "redis://host:port"
    secret_file: str | None = setting(optional(parse_text), None)
    secret_env: str | None = setting(optional(parse_text), None)
    tls: TlsSettings | None = setting(optional(table(TlsSettings)), None)

    payload: Payload = setting(parse_enum(Payload), Payload.TCP)
    num_connections: int = setting(parse_count(), factory=default_num_connections)  # to each peer
    connect_timeout_s: float = setting(parse_seconds, 1.0)  # with the handshake
    silence_timeout_s: float = setting(parse_seconds, 2.0)  # a peer that says nothing is gone
    transfer_timeout_s: float = setting(parse_seconds, 30.0)  # for a whole job
    idle_timeout_s: float = setting(parse_seconds, 60.0)  # until an unused connection closes
    backoff_min_s: float = setting(parse_seconds, 0.25)  # until a lost peer is tried again
    backoff_max_s: float = setting(parse_seconds, 10.0)
    hit_ttl_s: float = setting(parse_seconds, 2.0)  # how long answers of peers are believed
    miss_ttl_s: float = setting(parse_seconds, 0.25)
    num_answers_max: int = setting(parse_count(), 262_144)

    lease_s: float = setting(parse_seconds, 10.0)
    num_leased_max: int = setting(parse_count(), 256)  # chunks, for each peer
    park_s: float = setting(parse_seconds, 60.0)  # until a parked chunk is given up
    num_parked_max: int = setting(parse_count(), 1024)  # chunks, for all peers together
    num_peer_connections_max: int = setting(parse_count(), 16)  # accepted, from each peer
    num_strangers_max: int = setting(parse_count(), 64)  # accepted and not yet authenticated
    directory_lease_s: float = setting(parse_seconds, 15.0)  # of a host that stopped renewing it
    num_met_max: int = setting(parse_count(), 64)  # peers connected to through the directory
    requests_per_s_max: int = setting(parse_count(), 5000)  # for each peer
    bytes_per_s_max: int | None = setting(optional(parse_bytes), None)  # for each peer

    def check(self, path: str) -> None:
        """Refuse what would let strangers in or can't work.

        Raises:
            ConfigError: Names the setting.
        """
        if self.secret_file is not None and self.secret_env is not None:
            raise ConfigError(join(path, "secret_env"), "give it or secret_file, not both")
        if not self.has_authentication:
            advice = "needs authentication: set secret_file, secret_env or tls"
            if self.listen is not None and not is_loopback(self.listen.host):
                raise ConfigError(join(path, "listen"), f"{self.listen}: {advice}")
            for name, address in self.peers.items():
                if not is_loopback(address.host):
                    raise ConfigError(join(path, f"peers.{name}"), f"{address}: {advice}")
        if self.identity in self.peers:
            raise ConfigError(
                join(path, f"peers.{self.identity}"), "is this host itself (identity)"
            )
        if self.directory is not None and self.listen is not None:
            wide = not is_loopback(self.listen.host)
            if wide and self.advertise is None:
                raise ConfigError(join(path, "advertise"), "is required with directory and listen")

    @property
    def shelf_limits(self) -> ShelfLimits:
        """The limits of what is served."""
        return ShelfLimits(self.num_leased_max, self.num_parked_max, self.park_s)

    @property
    def has_authentication(self) -> bool:
        """Whether strangers are told from peers."""
        return self.tls is not None or self.secret_file is not None or self.secret_env is not None

    def read_secret(self, path: str) -> bytes:
        """Return the shared secret; empty where none is set.

        Raises:
            ConfigError: It can't be read or is too short to resist guessing.
        """
        if self.secret_file is not None:
            where, name = self.secret_file, join(path, "secret_file")
            try:
                secret = Path(self.secret_file).read_bytes().strip()
            except OSError as error:
                raise ConfigError(name, f"can't read {where}: {error.strerror}") from error
        elif self.secret_env is not None:
            where, name = self.secret_env, join(path, "secret_env")
            secret = os.environ.get(self.secret_env, "").strip().encode()
        else:
            return b""
        if len(secret) < SECRET_BYTES_MIN:
            raise ConfigError(
                name, f"{where} must hold at least {SECRET_BYTES_MIN} bytes, such as 32 random ones"
            )
        return secret
