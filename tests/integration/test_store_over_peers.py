"""Two stores in two processes, one of which pulls what the other keeps in memory."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvstrata
from kvstrata.testing import numbered_key, pattern
from tests.p2p_hosts import ROOT, secret_file
from tests.s3_server import free_ports

CHUNK_BYTES = 64 << 10
KEYS = [numbered_key(i) for i in range(24)]
OWNER = """
import json, sys
import kvstrata
from kvstrata.testing import numbered_key, pattern
settings = json.loads(sys.stdin.readline())
keys = [numbered_key(i) for i in range(24)]
with kvstrata.open(settings) as store:
    assert store.put(keys, [pattern(key, store.chunk_bytes) for key in keys]) == 24
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(store.get_stats().tiers["p2p"].counters), flush=True)
"""


def settings(identity: str, secret: str, **tier: object) -> dict[str, Any]:
    p2p = {"type": "p2p", "identity": identity, "secret_file": secret, **tier}
    return {
        "chunk_bytes": CHUNK_BYTES,
        "namespace": "model-a",
        "primary": {"num_chunks": 32},
        "tiers": [p2p],
        "max_wait_s": 10.0,
    }


@contextmanager
def owner(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a store that keeps all keys and listens; give its process and address."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        given = settings("owner", secret_file(folder), listen=address)
        process.stdin.write(json.dumps(given) + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ready\n"
        yield process, address
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.mark.slow
def test_a_store_pulls_from_one_in_another_process_that_shares_its_secret(tmp_path: Path) -> None:
    with owner(tmp_path) as (process, address):
        reader = settings("reader", secret_file(tmp_path), peers={"owner": address})
        with kvstrata.open(reader) as store:
            rows = [bytearray(CHUNK_BYTES) for _ in KEYS]
            assert store.get(KEYS, rows) == 24
            assert [bytes(row) for row in rows] == [pattern(key, CHUNK_BYTES) for key in KEYS]
            assert store.get_stats().tiers["p2p"]["loaded_chunks"] == 24
        served, _ = process.communicate("\n", timeout=30)
        assert json.loads(served)["served_chunks"] == 24
        assert json.loads(served)["protocol_errors"] == 0


@pytest.mark.slow
def test_a_store_with_another_secret_gets_nothing_and_the_owner_counts_it(tmp_path: Path) -> None:
    with owner(tmp_path) as (process, address):
        other = secret_file(tmp_path, "not the secret of this fleet")
        with kvstrata.open(settings("reader", other, peers={"owner": address})) as store:
            assert store.get(KEYS, [bytearray(CHUNK_BYTES) for _ in KEYS]) == 0
        served, _ = process.communicate("\n", timeout=30)
        assert json.loads(served)["served_chunks"] == 0
        assert json.loads(served)["protocol_errors"] >= 1
