"""A store whose lower tier is a bucket of a real S3 server."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("obstore")

import kvstrata
from kvstrata.testing import numbered_key, pattern
from tests.s3_server import S3Server, SeaweedFs

pytestmark = pytest.mark.slow

CHUNK_BYTES = 64 << 10
KEYS = [numbered_key(i) for i in range(24)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with SeaweedFs(tmp_path_factory.mktemp("weed")) as server:
        yield server


def settings(server: S3Server, namespace: str) -> dict[str, Any]:
    return {
        "chunk_bytes": CHUNK_BYTES,
        "namespace": namespace,
        "primary": {"num_chunks": 8},  # a third of what is stored
        "tiers": [{"type": "object", **server.settings("store")}],
        "max_wait_s": 30.0,
    }


def test_a_new_store_finds_in_the_bucket_what_a_closed_one_put(server: S3Server) -> None:
    with kvstrata.open(settings(server, "model-a")) as store:
        assert store.put(KEYS, [pattern(key, CHUNK_BYTES) for key in KEYS]) == 24
        assert store.flush(30.0)
    with kvstrata.open(settings(server, "model-b")) as stranger:
        assert stranger.get(KEYS, [bytearray(CHUNK_BYTES) for _ in KEYS]) == 0
    with kvstrata.open(settings(server, "model-a")) as store:
        rows = [bytearray(CHUNK_BYTES) for _ in KEYS]
        assert store.get(KEYS, rows) == 24
        assert [bytes(row) for row in rows] == [pattern(key, CHUNK_BYTES) for key in KEYS]
        assert store.get_stats().tiers["object"]["loaded_chunks"] == 24
