"""Keys and namespaces hold everything that changes the bytes, the same in every process."""

import os
import subprocess
import sys
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.namespace import (
    HASH_BYTES,
    NO_EXTRAS,
    HashExtras,
    MediaSpan,
    Namespace,
    hash_blocks,
    tagged_digest,
)

TOKENS = list(range(64))
BASE = Namespace(model="m", revision="r1", kv_dtype="bf16", layout="NHD", tokens_per_block=16)
OTHER: dict[str, Any] = {
    "model": "m2",
    "revision": "r2",
    "dtype": "f16",
    "kv_dtype": "fp8",
    "layout": "HND",
    "tokens_per_block": 32,
    "blocks_per_chunk": 2,
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
    "parallel_rank": 1,
    "topology_free": True,
    "hash_algorithm": "sha256",
    "codec": "zstd",
    "extra": (("window", "4096"),),
}


def test_every_field_of_a_namespace_changes_it() -> None:
    # Field reports E02 (dtype), E03 (weights), E04 (layout), E05 (parallel layout).
    assert OTHER.keys() == {item.name for item in fields(Namespace)}
    found = {BASE.fingerprint()} | {
        replace(BASE, **{name: value}).fingerprint() for name, value in OTHER.items()
    }
    assert len(found) == 1 + len(OTHER)
    assert BASE.fingerprint() == replace(BASE).fingerprint()
    assert len(BASE.fingerprint()) == 64


def test_parallel_layouts_are_apart_unless_declared_free_of_topology() -> None:
    # Field report E05.
    layouts = [
        {"tensor_parallel": tp, "pipeline_parallel": pp, "parallel_rank": rank}
        for tp, pp, rank in [(1, 1, 0), (2, 1, 0), (2, 1, 1), (1, 2, 0), (1, 2, 1)]
    ]
    bound: list[Any] = [replace(BASE, **layout) for layout in layouts]  # type: ignore[arg-type]
    assert len({namespace.fingerprint() for namespace in bound}) == 5
    free = {replace(namespace, topology_free=True).fingerprint() for namespace in bound}
    assert len(free) == 1
    assert free.isdisjoint({namespace.fingerprint() for namespace in bound})


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_another_process_derives_the_same_keys(seed: str) -> None:
    # Field reports E01 and D09: nothing depends on the interpreter's hash seed.
    program = (
        "from kvstrata.core.namespace import *;"
        "extras = HashExtras(adapter='a', salt=None, media=[MediaSpan(3, 9, b'i')]);"
        "print(hash_blocks(range(64), 16, extras)[-1].hex(), Namespace('m').fingerprint())"
    )
    extras = HashExtras(adapter="a", salt=None, media=[MediaSpan(3, 9, b"i")])
    expected = f"{hash_blocks(range(64), 16, extras)[-1].hex()} {Namespace('m').fingerprint()}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == expected


def test_adapters_versions_tenants_and_salts_are_all_apart() -> None:
    # Field reports E06 (adapters), E07 (tagged fields), E08 (adapter versions), E10, O01 (salts).
    all_extras = [
        NO_EXTRAS,
        HashExtras(adapter="X"),
        HashExtras(adapter="Y"),
        HashExtras(adapter="X", adapter_version="1"),
        HashExtras(adapter="X", adapter_version="2"),
        HashExtras(salt="X"),
        HashExtras(tenant="X"),
        HashExtras(tenant="X", salt="X"),
        HashExtras(tenant="Y", salt="X"),
        HashExtras(adapter="ab", salt="c"),
        HashExtras(adapter="a", salt="bc"),
        HashExtras(adapter=""),
        HashExtras(salt=""),
    ]
    chains = [hash_blocks(TOKENS, 16, extras) for extras in all_extras]
    for one, two in combinations(chains, 2):
        assert set(one).isdisjoint(two)
    assert chains == [hash_blocks(TOKENS, 16, extras) for extras in all_extras]


Named = list[tuple[str, str | None]]
names = st.none() | st.text(max_size=3)
named_values = st.lists(st.tuples(st.sampled_from(["a", "b", "ab"]), names), max_size=3)


@given(named_values, named_values)
def test_no_two_lists_of_named_values_agree(one: Named, two: Named) -> None:
    # Field report E07.
    assert (tagged_digest("d", *one) == tagged_digest("d", *two)) == (one == two)


def test_values_of_different_types_and_domains_are_apart() -> None:
    values: list[Any] = [None, "", b"", 0, "0", b"0", "n", 10, "10"]
    assert len({tagged_digest("d", ("x", value)) for value in values}) == len(values)
    assert tagged_digest("d", ("x", "y")) != tagged_digest("e", ("x", "y"))


def test_an_image_changes_its_blocks_and_all_later_ones_only() -> None:
    # Field report E09.
    plain = hash_blocks(TOKENS, 16)
    one = hash_blocks(TOKENS, 16, HashExtras(media=[MediaSpan(20, 30, b"cat")]))
    two = hash_blocks(TOKENS, 16, HashExtras(media=[MediaSpan(20, 30, b"dog")]))
    assert plain[0] == one[0] == two[0]
    for i in (1, 2, 3):
        assert len({plain[i], one[i], two[i]}) == 3
    assert one == hash_blocks(TOKENS, 16, HashExtras(media=[MediaSpan(20, 30, b"cat")]))
    shifted = hash_blocks(TOKENS, 16, HashExtras(media=[MediaSpan(21, 31, b"cat")]))
    assert shifted[1] != one[1]


def test_five_thousand_images_have_five_thousand_keys() -> None:
    # Field report E09.
    keys = {
        hash_blocks(TOKENS[:16], 16, HashExtras(media=[MediaSpan(0, 16, i.to_bytes(2, "big"))]))[0]
        for i in range(5_000)
    }
    assert len(keys) == 5_000


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=70),
    st.integers(1, 20),
    st.integers(0, 70),
)
def test_a_growing_sequence_keeps_its_hashes(tokens: list[int], size: int, cut: int) -> None:
    hashes = hash_blocks(tokens, size)
    assert len(hashes) == len(tokens) // size
    assert all(len(found) == HASH_BYTES for found in hashes)
    first = hash_blocks(tokens[:cut], size)
    assert first == hashes[: len(first)]
    assert hash_blocks(tokens, size, known=first) == hashes


@given(st.lists(st.integers(0, 3), min_size=6, max_size=6), st.integers(0, 5), st.integers(1, 9))
def test_one_token_changes_its_block_and_all_later_ones(
    tokens: list[int], at: int, by: int
) -> None:
    changed = [*tokens[:at], tokens[at] + by, *tokens[at + 1 :]]
    pairs = list(zip(hash_blocks(tokens, 2), hash_blocks(changed, 2), strict=True))
    assert [one == two for one, two in pairs] == [i < at // 2 for i in range(3)]


def test_block_sizes_are_apart() -> None:
    assert set(hash_blocks(TOKENS, 16)).isdisjoint(hash_blocks(TOKENS, 32))
    with pytest.raises(ValueError, match="tokens_per_block"):
        hash_blocks(TOKENS, 0)


@pytest.mark.parametrize(
    "name",
    ["../../x", "a@b", "x" * 400, "a\nb", "a\0b", "\uff4dodel", "model", "a/b", "", "\ud800"],
)
def test_hostile_names_stay_distinct_and_become_plain_hexadecimal(name: str) -> None:
    # Field report E12: no name from outside ever becomes part of a file name.
    fingerprint = Namespace(model=name).fingerprint()
    assert set(fingerprint) <= set("0123456789abcdef")
    assert fingerprint != Namespace(model=name + " ").fingerprint()
    assert hash_blocks(TOKENS, 16, HashExtras(salt=name)) != hash_blocks(
        TOKENS, 16, HashExtras(salt=name + " ")
    )
