"""L07: chunks deleted by the start of their keys, while stores of them are on their way."""

from pathlib import Path
from typing import Any

import pytest

from kvstrata.build import TIERS
from kvstrata.core.keys import OffloadKey
from kvstrata.core.results import LookupResult
from kvstrata.core.tier import SecondaryTierManager, TierEnv
from kvstrata.testing import FakeClock, FakeRegion, numbered_key
from kvstrata.testing.tier_calls import look_up, store, submit_store, wait_for

NUM_CHUNKS = 64
MINE = [OffloadKey(b"1" + numbered_key(i)) for i in range(NUM_CHUNKS)]
OTHERS = [OffloadKey(b"2" + numbered_key(i)) for i in range(NUM_CHUNKS)]
KINDS: dict[str, dict[str, Any]] = {
    "memory": {},
    "fs": {"max_bytes": "1GiB", "direct": "off"},
    "object": {"url": "memory://", "max_bytes": "1GiB"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_stores_in_flight_do_not_bring_deleted_chunks_back(kind: str, tmp_path: Path) -> None:
    slots = FakeRegion(2 * NUM_CHUNKS, 1000)
    settings = KINDS[kind] | ({"root": str(tmp_path)} if kind == "fs" else {})
    env = TierEnv(kind, "test", FakeClock(), "tiers[0]")
    tier: SecondaryTierManager = TIERS.get(kind, "type").from_config(slots, settings, env)
    store(tier, 1, {MINE[0]: 0, OTHERS[0]: 1})
    submit_store(tier, 2, {key: i for i, key in enumerate([*MINE, *OTHERS])})
    tier.delete_prefix(b"1")
    failed = wait_for(tier, 2)[2].failed
    assert failed <= set(MINE)
    assert {look_up(tier, key) for key in MINE} == {LookupResult.MISS}
    assert {look_up(tier, key) for key in OTHERS} == {LookupResult.HIT}
    assert store(tier, 3, {key: i for i, key in enumerate(MINE)}).failed == frozenset()
    assert {look_up(tier, key) for key in MINE} == {LookupResult.HIT}
    tier.shutdown()
