"""Mutual authentication: both sides prove that they know the secret before anything is said.

The caller sends `Hello`, the called `Challenge`, each with a fresh nonce. The caller proves itself
first (`Proof`), so that nobody who merely connects gets material to guess the secret with; then the
called does (`Welcome`). A proof is a code under the secret over both messages and the prover's
role: it can't be replayed, since the other side's nonce is in it, nor be sent back to its maker.
"""

import hmac
import os
import ssl
from dataclasses import dataclass, field
from typing import Final

from kvstrata.core.errors import ConfigError, ProtocolError
from kvstrata.core.settings import join
from kvstrata.tiers.p2p.settings import TlsSettings
from kvstrata.tiers.p2p.transport import Channel
from kvstrata.tiers.p2p.wire import (
    VERSION,
    Challenge,
    Hello,
    Message,
    Proof,
    Refused,
    Welcome,
)

NONCE_BYTES: Final = 32
CALLER: Final = b"kvstrata p2p 1 caller"
CALLED: Final = b"kvstrata p2p 1 called"
CALLER_KEY: Final = b"kvstrata p2p 1 messages of the caller"
CALLED_KEY: Final = b"kvstrata p2p 1 messages of the called"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who this process is to its peers.

    `generation` is new with every start: peers tell by it that what they knew is void.
    """

    identity: str
    namespace: str
    chunk_bytes: int
    secret: bytes = field(default=b"", repr=False)
    calling_tls: ssl.SSLContext | None = None
    called_tls: ssl.SSLContext | None = None
    generation: bytes = field(default_factory=lambda: os.urandom(NONCE_BYTES))


@dataclass(frozen=True, slots=True)
class Remote:
    """Who is at the other end, proved."""

    identity: str
    generation: bytes


def call(channel: Channel, own: Credentials, identity: str) -> Remote:
    """Prove who we are to a listening host, and have it prove that it is `identity`.

    Args:
        channel: Fresh; carries authenticated messages afterwards.
        own: Who we are.
        identity: Who is expected there.

    Raises:
        ProtocolError: It is somebody else, does not know the secret, or refuses us.
        OSError: The connection failed.
    """
    nonce = os.urandom(NONCE_BYTES)
    hello = channel.send(
        Hello(VERSION, own.identity, own.generation, own.namespace, own.chunk_bytes, nonce)
    )
    challenge, challenge_bytes = channel.receive_signed(Message)
    if isinstance(challenge, Refused):
        raise ProtocolError(channel.name, f"refuses: {challenge.reason}")
    if not isinstance(challenge, Challenge):
        raise ProtocolError(channel.name, f"an unexpected {type(challenge).__name__}")
    if challenge.identity != identity:
        raise ProtocolError(channel.name, f"is {challenge.identity!r}, expected was {identity!r}")
    _check_certificate(channel, identity)
    transcript = _transcript(hello, challenge_bytes)
    channel.send(Proof(_prove(own.secret, CALLER, transcript)))
    answer = channel.receive(Message)
    if isinstance(answer, Refused):
        raise ProtocolError(channel.name, f"refuses: {answer.reason}")
    if not isinstance(answer, Welcome) or not hmac.compare_digest(
        answer.mac, _prove(own.secret, CALLED, transcript)
    ):
        raise ProtocolError(channel.name, "does not know the secret")
    channel.authenticate(
        _prove(own.secret, CALLER_KEY, transcript), _prove(own.secret, CALLED_KEY, transcript)
    )
    return Remote(challenge.identity, challenge.generation)


def answer(channel: Channel, own: Credentials) -> Remote:
    """Have a caller prove who it is, then prove who we are. Arguments and errors as in `call`.

    A caller of another namespace or chunk size is told so, once it has proved itself.
    """
    hello, hello_bytes = channel.receive_signed(Hello)
    if hello.version != VERSION:
        channel.send(Refused(f"version {VERSION} is spoken here"))
        raise ProtocolError(channel.name, f"speaks version {hello.version}")
    challenge = channel.send(Challenge(own.identity, own.generation, os.urandom(NONCE_BYTES)))
    transcript = _transcript(hello_bytes, challenge)
    proof = channel.receive(Proof)
    if not hmac.compare_digest(proof.mac, _prove(own.secret, CALLER, transcript)):
        raise ProtocolError(channel.name, "does not know the secret")
    _check_certificate(channel, hello.identity)
    reason = None
    if hello.identity == own.identity:
        reason = f"{own.identity!r} is taken; give each host its own identity"
    elif hello.namespace != own.namespace:
        reason = "the namespace is another: model, dtype or layout differ"
    elif hello.chunk_bytes != own.chunk_bytes:
        reason = f"a chunk has {own.chunk_bytes} bytes here, not {hello.chunk_bytes}"
    if reason is not None:
        channel.send(Refused(reason))
        raise ProtocolError(channel.name, reason)
    channel.send(Welcome(_prove(own.secret, CALLED, transcript)))
    channel.authenticate(
        _prove(own.secret, CALLED_KEY, transcript), _prove(own.secret, CALLER_KEY, transcript)
    )
    return Remote(hello.identity, hello.generation)


def _transcript(hello: bytes, challenge: bytes) -> bytes:
    return len(hello).to_bytes(4, "big") + hello + challenge


def _prove(secret: bytes, label: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, label + b"\0" + transcript, "sha256")


def _check_certificate(channel: Channel, identity: str) -> None:
    names = channel.certified_names
    if names is not None and identity not in names:
        raise ProtocolError(channel.name, f"its certificate is for {names}, not for {identity!r}")


def tls_contexts(settings: TlsSettings, path: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts for calling and for being called; both verify the other side.

    Raises:
        ConfigError: A file can't be read or used.
    """
    calling = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    calling.check_hostname = False  # the identity is checked instead: it is not an address
    called = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for context in (calling, called):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(settings.certificate, settings.key)
        except (OSError, ValueError) as error:
            raise ConfigError(join(path, "tls.certificate"), f"can't be used: {error}") from error
        try:
            context.load_verify_locations(settings.authority)
        except (OSError, ValueError) as error:
            raise ConfigError(join(path, "tls.authority"), f"can't be used: {error}") from error
    return calling, called
