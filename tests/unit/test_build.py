"""A configuration becomes a manager, or an error that says which setting and what instead."""

import os
from typing import Any

import pytest

from kvstrata.build import POLICIES, build_manager
from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError
from kvstrata.core.namespace import Namespace
from kvstrata.testing import FakeBackend, chain
from kvstrata.testing.manager_calls import end_step, finish, load, look_up, start, store
from tests.host_memory import taken_bytes

PRIMARY: dict[str, Any] = {"num_chunks": 4, "policy": "lru"}
FAKE = "kvstrata.testing:FakeTier"


def error_of(config: object, chunk_bytes: int = 100) -> str:
    with pytest.raises(ConfigError) as caught:
        build_manager(config, chunk_bytes=chunk_bytes, namespace="n")  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("prefault", [True, False])
def test_host_memory_is_taken_at_the_start_where_that_is_asked_for(prefault: bool) -> None:
    before = taken_bytes()
    config = {"primary": PRIMARY | {"prefault": prefault}}
    manager = build_manager(config, chunk_bytes=4 << 20, namespace="n")
    assert (taken_bytes() - before >= 16 << 20) is prefault
    manager.shutdown(1)


def test_a_mapping_and_a_config_build_the_same() -> None:
    for config in ({"primary": PRIMARY}, Config.parse({"primary": PRIMARY})):
        manager = build_manager(config, chunk_bytes=100, namespace=Namespace("m"))
        assert len(manager.slots) == 4
        ctx = start(manager, "r")
        assert store(manager, chain("ab"), ctx) == chain("ab")
        load(manager, chain("ab"), ctx)
        manager.shutdown()


@pytest.mark.parametrize("policy", [*POLICIES.names(), "auto", "kvstrata.policies.lru:LruPolicy"])
def test_every_named_policy_serves(policy: str) -> None:
    manager = build_manager(
        {"primary": {"num_chunks": 4, "policy": policy}}, chunk_bytes=100, namespace="n"
    )
    for i in range(20):
        ctx = start(manager, f"r{i}")
        store(manager, chain("abc"[: 1 + i % 3] + str(i % 5)), ctx)
        finish(manager, ctx)
    assert 0 < manager.get_stats()["num_resident"] <= 4
    manager.shutdown()


def test_bytes_become_whole_chunks_that_fit() -> None:
    # Field report P05.
    manager = build_manager({"primary": {"bytes": "64KiB"}}, chunk_bytes=5_000, namespace="n")
    assert len(manager.slots) == 8
    assert manager.get_stats()["reserved_bytes"] == 65_536
    manager.shutdown()


def test_less_than_one_chunk_is_an_error_that_names_both_sizes() -> None:
    # Field reports P05 and H02.
    text = error_of({"primary": {"bytes": "4KiB"}}, chunk_bytes=5_000)
    assert text.startswith("primary.bytes: ")
    assert "4096" in text
    assert "5000" in text


@pytest.mark.parametrize(
    ("config", "path", "said"),
    [
        ({"primary": {**PRIMARY, "cpu_bytes_to_use_per_rank": 1}}, "primary.cpu_bytes_to", "bytes"),
        ({"primary": {**PRIMARY, "policy": "lur"}}, "primary.policy", "did you mean lru?"),
        ({"primary": PRIMARY, "tiers": [{"type": "memry"}]}, "tiers[0].type", "memory"),
        ({"primary": PRIMARY, "tiers": [{"type": "x:Y"}]}, "tiers[0].type", "can't be imported"),
        (
            {"primary": PRIMARY, "tiers": [{"type": FAKE}, {"type": FAKE, "name": "b", "hodl": 1}]},
            "tiers[1].hodl",
            "did you mean hold?",
        ),
        (
            {"primary": PRIMARY, "tiers": [{"type": "fs", "root_dirr": "/x", "max_bytes": "1GiB"}]},
            "tiers[0].root_dirr",
            "root",
        ),
    ],
)
def test_a_mistake_is_named_with_what_was_meant(config: object, path: str, said: str) -> None:
    # Field report P02.
    text = error_of(config)
    assert text.startswith(path)
    assert said in text


def test_an_error_leaves_nothing_behind() -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        error_of(
            {"primary": PRIMARY, "tiers": [{"type": FAKE}, {"type": FAKE, "name": "b", "x": 1}]}
        )
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_tier_named_by_its_path_is_used() -> None:
    # Field report P04.
    backend = FakeBackend()
    manager = build_manager(
        {"primary": PRIMARY, "tiers": [{"type": FAKE, "backend": backend}]},
        chunk_bytes=100,
        namespace="n",
    )
    ctx = start(manager, "r")
    store(manager, chain("abcd"), ctx)
    finish(manager, ctx)
    end_step(manager)
    assert set(backend.chunks) == set(chain("abcd"))
    manager.reset_cache()
    backend.chunks |= {chain("a")[0]: backend.chunks.get(chain("a")[0], b"a" * 100)}
    assert look_up(manager, chain("a"), start(manager, "reader")) == 1
    manager.shutdown()
