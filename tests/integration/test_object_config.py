"""The object tier in a manager, from a configuration."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("obstore")

from kvstrata.build import build_manager
from kvstrata.core.errors import ConfigError
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.testing import numbered_key, pattern

CHUNK_BYTES = 5_000
PATIENCE_S = 30.0


def test_a_chunk_comes_back_through_a_new_manager(tmp_path: Path) -> None:
    tier = {"type": "object", "url": f"file://{tmp_path}", "max_bytes": "1MiB"}
    config = {"primary": {"num_chunks": 2}, "tiers": [tier]}
    keys = [numbered_key(i) for i in range(2)]
    ctx = ReqContext("one")
    first = build_manager(config, chunk_bytes=CHUNK_BYTES, namespace="n")
    first.on_new_request(ctx)
    prepared = first.prepare_store(keys, ctx)
    assert prepared is not None
    for key, slot in zip(prepared.keys_to_store, prepared.store_spec.slots, strict=True):
        first.slots[slot][:] = pattern(key, CHUNK_BYTES)
    first.complete_store(keys, ctx)
    first.on_request_finished(ctx)
    first.on_schedule_end(ScheduleEndContext((), ()))
    assert first.shutdown(PATIENCE_S).num_abandoned == 0

    second = build_manager(config, chunk_bytes=CHUNK_BYTES, namespace="n")
    ctx = ReqContext("two")
    second.on_new_request(ctx)
    found = None
    for _ in range(100_000):
        found = second.lookup(keys, ctx)
        if found is not None:
            break
        second.on_schedule_end(ScheduleEndContext(("two",), ()))
    assert found == 2
    spec = second.prepare_load(keys, ctx)
    assert [second.slots[slot] == pattern(key, CHUNK_BYTES)
            for key, slot in zip(keys, spec.slots, strict=True)] == [True, True]  # fmt: skip
    second.complete_load(keys, ctx)
    second.shutdown(PATIENCE_S)


def test_a_wrong_setting_has_its_dotted_path() -> None:
    tiers = [{"type": "memory"}, {"type": "object", "url": "s3://"}]
    with pytest.raises(ConfigError, match=r"^tiers\[1\]\.url: must name a bucket"):
        build_manager(
            {"primary": {"num_chunks": 2}, "tiers": tiers}, chunk_bytes=CHUNK_BYTES, namespace="n"
        )


def test_without_obstore_the_error_says_what_to_install() -> None:
    script = """
import sys
sys.modules["obstore"] = None
from kvstrata.build import build_manager
tiers = [{"type": "object", "url": "memory://"}]
build_manager({"primary": {"num_chunks": 2}, "tiers": tiers}, chunk_bytes=4096, namespace="n")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert "ConfigError: tiers[0].type: 'object' can't be imported" in done.stderr
    assert "install kvstrata[object]" in done.stderr
