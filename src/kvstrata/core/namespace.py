"""Derive block hashes and namespaces that hold everything that changes a chunk's bytes."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

HASH_BYTES = 32


def tagged_digest(domain: str, *named: tuple[str, bytes | str | int | None]) -> bytes:
    """Hash named values so that no two different lists of them agree: 32 bytes, SHA-256.

    Every name and value is written with its length, and None is not the empty text.
    """
    digest = hashlib.sha256()
    for part in (domain.encode(), *(piece for pair in named for piece in _encoded(*pair))):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _encoded(name: str, value: bytes | str | int | None) -> tuple[bytes, bytes]:
    match value:
        case None:
            return name.encode(), b"n"
        case bytes():
            return name.encode(), b"b" + value
        case str():
            return name.encode(), b"s" + value.encode("utf-8", "surrogatepass")
        case _:
            return name.encode(), b"i" + str(int(value)).encode()


@dataclass(frozen=True, slots=True)
class Namespace:
    """What has to be equal for the bytes of equal keys to be equal.

    `parallel_rank` is part of the layout: the chunk of tensor rank 0 is not that of rank 1. Where a
    layout is the same for every rank and size, declare it with `topology_free`.
    """

    model: str
    revision: str | None = None  # weights fingerprint or revision
    dtype: str | None = None
    kv_dtype: str | None = None
    layout: str | None = None
    tokens_per_block: int | None = None
    blocks_per_chunk: int | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    parallel_rank: int | None = None
    topology_free: bool = False
    hash_algorithm: str | None = None
    codec: str | None = None
    extra: tuple[tuple[str, str], ...] = field(default=())

    def fingerprint(self) -> str:
        """Return 64 hexadecimal digits that differ whenever any field does."""
        free = {"tensor_parallel", "pipeline_parallel", "parallel_rank"}
        named: list[tuple[str, bytes | str | int | None]] = [
            (item.name, getattr(self, item.name))
            for item in fields(self)
            if item.name != "extra" and not (self.topology_free and item.name in free)
        ]
        named += [(f"extra.{name}", value) for name, value in sorted(self.extra)]
        return tagged_digest("kvstrata.namespace.v1", *named).hex()


def in_epoch(namespace: str, epoch: str) -> str:
    """Return the namespace of chunks that were computed with the weights of an epoch.

    The first epoch, before any weights were replaced, has no name.
    """
    if not epoch:
        return namespace
    return tagged_digest("kvstrata.epoch.v1", ("namespace", namespace), ("epoch", epoch)).hex()


class MediaSpan(NamedTuple):
    """Tokens `start` to `end` (exclusive) are placeholders of the media item with this identity."""

    start: int
    end: int
    media_id: bytes


@dataclass(frozen=True, slots=True)
class HashExtras:
    """What besides the tokens belongs to a request's key.

    `adapter_version` changes when an adapter is reloaded under its name. `tenant` is what the
    operator's side says; `salt` comes from the client and can only divide a tenant further.
    """

    adapter: str | None = None
    adapter_version: str | None = None
    tenant: str | None = None
    salt: str | None = None
    media: Sequence[MediaSpan] = ()


NO_EXTRAS = HashExtras()


def hash_blocks(
    tokens: Sequence[int],
    tokens_per_block: int,
    extras: HashExtras = NO_EXTRAS,
    *,
    known: Sequence[bytes] = (),
) -> list[bytes]:
    """Return the chained hash of every full block of `tokens`, 32 bytes each.

    The result depends on nothing but the arguments: it is equal in every process. Media items
    change the hashes of the blocks that they touch, and of all later ones.

    Args:
        tokens: Token ids, each 0 to 2**32 - 1.
        tokens_per_block: Tokens in a block, at least 1.
        extras: Adapter, tenant, salt and media of the request.
        known: Hashes of the first blocks from an earlier call with the same arguments; they are
            taken over, so that a growing sequence costs only its new blocks.
    """
    if tokens_per_block < 1:
        raise ValueError(f"tokens_per_block must be at least 1, not {tokens_per_block}")
    hashes = list(known)
    parent = (
        hashes[-1]
        if hashes
        else tagged_digest(
            "kvstrata.root.v1",
            ("adapter", extras.adapter),
            ("adapter_version", extras.adapter_version),
            ("tenant", extras.tenant),
            ("salt", extras.salt),
            ("tokens_per_block", tokens_per_block),
        )
    )
    for start in range(len(hashes) * tokens_per_block, len(tokens), tokens_per_block):
        end = start + tokens_per_block
        if end > len(tokens):
            break
        parent = _hash_block(parent, tokens[start:end], start, extras.media)
        hashes.append(parent)
    return hashes


def _hash_block(
    parent: bytes, tokens: Sequence[int], start: int, media: Sequence[MediaSpan]
) -> bytes:
    digest = hashlib.sha256(parent)
    digest.update(b"".join(token.to_bytes(4, "little") for token in tokens))
    for span in media:
        if span.start < start + len(tokens) and span.end > start:
            digest.update(
                tagged_digest(
                    "kvstrata.media.v1",
                    ("media_id", span.media_id),
                    ("offset", span.start - start),
                    ("end", span.end - start),
                )
            )
    return digest.digest()
