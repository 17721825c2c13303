"""Messages between peers, their bounds, and how one becomes bytes."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, Final

import msgspec
import xxhash
from msgspec import Meta, Struct

from kvstrata.core.errors import ProtocolError
from kvstrata.core.keys import OffloadKey

VERSION: Final = 1
LENGTH_BYTES: Final = 4
MAC_BYTES: Final = 16
HANDSHAKE_BYTES_MAX: Final = 2048  # of a message before the peer is known
MESSAGE_BYTES_MAX: Final = 1 << 20
KEYS_MAX: Final = 2048  # of one message

Key = Annotated[bytes, Meta(min_length=5, max_length=256)]
Keys = Annotated[Sequence[Key], Meta(max_length=KEYS_MAX)]
Text = Annotated[str, Meta(max_length=256)]
Nonce = Annotated[bytes, Meta(min_length=32, max_length=32)]
Proof32 = Annotated[bytes, Meta(min_length=32, max_length=32)]
Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]
Count = Annotated[int, Meta(ge=0, le=2**40)]


class State(IntEnum):
    """What a peer says of a key, one byte each."""

    MISS = 0
    HIT = 1  # readable now
    WAIT = 2  # being brought up from a slower tier
    BUSY = 3  # over a limit, ask later


class Message(Struct, array_like=True, forbid_unknown_fields=True):
    """Any message."""


class Hello(Message, tag=1):
    """The caller: who it is, and what it expects of the other."""

    version: int
    identity: Text
    generation: Nonce
    namespace: Text
    chunk_bytes: Count
    nonce: Nonce


class Challenge(Message, tag=2):
    """The called: who it is. It says nothing else before the caller has proved itself."""

    identity: Text
    generation: Nonce
    nonce: Nonce


class Proof(Message, tag=3):
    """The caller knows the secret."""

    mac: Proof32


class Welcome(Message, tag=4):
    """The called knows it too."""

    mac: Proof32


class Refused(Message, tag=5):
    """Why the handshake ends here."""

    reason: Text


class Lookup(Message, tag=10):
    """Which of these can be read?"""

    keys: Keys


class Found(Message, tag=11):
    """One `State` byte for each key asked."""

    states: Annotated[bytes, Meta(max_length=KEYS_MAX)]


class Fetch(Message, tag=12):
    """Send these. Answered by `Found`, then raw by the payload of the HITs, in their order.

    After each `num_per_seals` payloads, and after the last, come their `Seals`.
    """

    keys: Keys
    num_per_seals: Annotated[int, Meta(ge=1, le=KEYS_MAX)] = 1


class Seal(Struct, array_like=True, forbid_unknown_fields=True):
    """The checksum of what was sent; None if the chunk left before the end: what came is void.

    `expires_at_s`, seconds since 1970, is when the chunk must be gone everywhere.
    """

    checksum: Digest | None
    expires_at_s: float | None = None


class Seals(Message, tag=13):
    """What `Seal` says, of each payload that came since the last ones, in order."""

    seals: Annotated[Sequence[Seal], Meta(max_length=KEYS_MAX)]


class Attach(Message, tag=20):
    """How are your slots read with NIXL? Answered by `Attached`."""


class Attached(Message, tag=21):
    """The agent's metadata; empty where NIXL is not used."""

    metadata: Annotated[bytes, Meta(max_length=HANDSHAKE_BYTES_MAX * 32)]


class Locate(Message, tag=22):
    """Lease these. Answered by `Found`, then `Located`; ended by `Release`, answered by `Seals`."""

    keys: Keys


class Located(Message, tag=23):
    """The address of each HIT, in order."""

    addresses: Annotated[Sequence[Annotated[int, Meta(ge=0)]], Meta(max_length=KEYS_MAX)]


class Release(Message, tag=24):
    """The chunks were read, or will not be."""


AnyMessage = (
    Hello | Challenge | Proof | Welcome | Refused
    | Lookup | Found | Fetch | Seals
    | Attach | Attached | Locate | Located | Release
)  # fmt: skip

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """Return the message as bytes, without its length."""
    return _encoder.encode(message)


def decode(body: bytes, source: str) -> Message:
    """Read a message.

    Raises:
        ProtocolError: It is none, or out of bounds. Nothing else is ever raised.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(source, f"not a message: {error}") from error


def chunk_digest(key: OffloadKey, length: int) -> xxhash.xxh3_128:
    """Return a running checksum over key, length and, as it is fed, the payload."""
    digest = xxhash.xxh3_128(len(key).to_bytes(2, "little") + key)
    digest.update(length.to_bytes(8, "little"))
    return digest
