"""The shared codec: whole chunks are recognised, everything else is refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.errors import CorruptChunkError
from kvstrata.core.keys import OffloadKey
from kvstrata.tiers import chunk_format
from kvstrata.tiers.chunk_format import (
    HEADER_BYTES,
    KEY_BYTES_MAX,
    decode_header,
    digest_namespace,
    encode_header,
    verify_chunk,
)

KEY = OffloadKey(b"some key")
PAYLOAD = bytes(range(256)) * 8
DIGEST = digest_namespace("model")


@given(st.binary(max_size=KEY_BYTES_MAX), st.binary(max_size=64), st.floats(min_value=0))
def test_a_header_says_what_it_was_made_of(key: bytes, payload: bytes, expires_at_s: float) -> None:
    header = encode_header(OffloadKey(key), payload, DIGEST, expires_at_s)
    assert len(header) == HEADER_BYTES
    found = verify_chunk(header, payload, OffloadKey(key), DIGEST, "fs")
    assert (found.key, found.payload_bytes) == (key, len(payload))
    assert found.expires_at_s == expires_at_s
    assert found.namespace_digest == DIGEST


def test_a_chunk_without_expiry_never_expires() -> None:
    assert decode_header(encode_header(KEY, PAYLOAD, DIGEST), "fs").expires_at_s == math.inf


@pytest.mark.parametrize("at", [*range(90), 200, 4079, *range(4080, 4096)])
def test_any_altered_byte_of_the_header_is_noticed(at: int) -> None:
    header = bytearray(encode_header(KEY, PAYLOAD, DIGEST))
    header[at] ^= 1
    with pytest.raises(CorruptChunkError, match=r"^fs: "):
        decode_header(header, "fs")


@given(st.integers(0, len(PAYLOAD) - 1), st.integers(1, 255))
def test_any_altered_byte_of_the_payload_is_noticed(at: int, change: int) -> None:
    payload = bytearray(PAYLOAD)
    payload[at] ^= change
    with pytest.raises(CorruptChunkError, match="checksum differ"):
        verify_chunk(encode_header(KEY, PAYLOAD, DIGEST), payload, KEY, DIGEST, "fs")


@pytest.mark.parametrize("length", [0, 1, 80, HEADER_BYTES - 1])
def test_a_short_header_is_refused(length: int) -> None:
    with pytest.raises(CorruptChunkError, match=f"{length} of 4096"):
        decode_header(encode_header(KEY, PAYLOAD, DIGEST)[:length], "fs")


def test_a_chunk_of_another_key_namespace_or_length_is_refused() -> None:
    header = encode_header(KEY, PAYLOAD, DIGEST)
    with pytest.raises(CorruptChunkError, match="asked for"):
        verify_chunk(header, PAYLOAD, OffloadKey(b"another"), DIGEST, "fs")
    with pytest.raises(CorruptChunkError, match="another namespace"):
        verify_chunk(header, PAYLOAD, KEY, digest_namespace("other"), "fs")
    with pytest.raises(CorruptChunkError, match="2048 bytes instead of 2047"):
        verify_chunk(header, PAYLOAD[:-1], KEY, DIGEST, "fs")


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(chunk_format, "VERSION", 2)
        header = encode_header(KEY, PAYLOAD, DIGEST)
    with pytest.raises(CorruptChunkError, match="version 2"):
        decode_header(header, "fs")


def test_a_key_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        encode_header(OffloadKey(bytes(KEY_BYTES_MAX + 1)), PAYLOAD, DIGEST)
