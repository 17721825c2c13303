"""Store, evict, load and compare through every tier, and say what the settings come to."""

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvstrata.build import build_manager, check_memory, num_primary_chunks, tier_num_chunks
from kvstrata.core.config import Config, PrimaryConfig, WritePolicy
from kvstrata.core.keys import OffloadKey, make_offload_key
from kvstrata.core.manager import SuspendMode
from kvstrata.core.memory import row_bytes_for
from kvstrata.core.settings import parse_bytes
from kvstrata.kv_store import KVStore

NUM_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one tier holds.

    Attributes:
        name: The tier.
        chunks: Chunks, for one rank in the primary; None where the tier has no limit of its own.
        rank_bytes: Bytes for one rank, rows rounded up.
        host_bytes: Bytes for all ranks of this host.
        tokens: Tokens of one KV group that the chunks hold.
    """

    name: str
    chunks: int | None
    rank_bytes: int | None
    host_bytes: int | None
    tokens: int | None


def resolve_plan(config: Config, chunk_bytes: int) -> list[Capacity]:
    """Return what every tier holds, the primary first.

    Raises:
        ConfigError: The primary holds no chunk at all.
    """
    num_chunks = num_primary_chunks(config, chunk_bytes)
    rank_bytes = num_chunks * row_bytes_for(chunk_bytes)
    plan = [
        Capacity(
            "primary",
            num_chunks,
            rank_bytes,
            rank_bytes * config.num_ranks,
            num_chunks * config.tokens_per_chunk,
        )
    ]
    for i, tier in enumerate(config.tiers):
        chunks = tier_num_chunks(tier, i, chunk_bytes)
        if chunks is None:
            plan.append(Capacity(tier.name, None, None, None, None))
            continue
        limit = tier.settings.get("max_bytes")
        num_bytes = chunks * chunk_bytes
        if limit is not None:
            num_bytes = parse_bytes(limit, f"tiers[{i}].max_bytes")
        tokens = chunks * config.tokens_per_chunk
        plan.append(Capacity(tier.name, chunks, num_bytes, num_bytes, tokens))
    return plan


@dataclass(frozen=True, slots=True)
class TierCheck:
    """How one tier did.

    Attributes:
        name: The tier.
        problem: What is wrong with it; None if nothing was found.
        verdict: What was found, in words.
        store_s: Seconds that it took to store.
        load_s: Seconds that it took to load the same chunks.
    """

    name: str
    problem: str | None
    verdict: str
    store_s: float
    load_s: float


def check_tiers(config: Config, chunk_bytes: int, wait_s: float = 10.0) -> Iterator[TierCheck]:
    """Try each tier for real, in a namespace of its own that is removed afterwards.

    Raises:
        ConfigError: This host has not the primary's memory, or a setting of a tier is wrong.
    """
    check_memory(config, chunk_bytes)
    for i in range(len(config.tiers)):
        yield _check_tier(config, i, chunk_bytes, wait_s)


def _check_tier(config: Config, index: int, chunk_bytes: int, wait_s: float) -> TierCheck:
    tier = replace(config.tiers[index], write=WritePolicy.THROUGH)
    alone = Config(primary=PrimaryConfig(num_chunks=NUM_CHUNKS), tiers=(tier,), max_wait_s=wait_s)
    name = f"self-check-{secrets.token_hex(8)}"
    manager = build_manager(alone, chunk_bytes=chunk_bytes, namespace=name)
    keys = [make_offload_key(secrets.token_bytes(32), 0) for _ in range(NUM_CHUNKS)]
    with KVStore(manager, max_wait_s=wait_s) as store:
        rows = [secrets.token_bytes(chunk_bytes) for _ in keys]
        began_s = time.monotonic()
        if "stores" in store.get_stats().tiers[tier.name].notes:
            return TierCheck(tier.name, None, "started; it takes no stores to try it with", 0, 0)
        store.put(keys, rows)
        is_flushed = store.flush(wait_s)
        stored_s = time.monotonic()
        store.suspend(SuspendMode.RELEASE, wait_s)  # the primary is empty now
        problem, load_s = _load_back(store, keys, rows)
        if problem is not None and not is_flushed:
            problem = f"storing did not end within {wait_s:g} s"
        store.clear()
        verdict = problem or "every byte came back"
        return TierCheck(tier.name, problem, verdict, stored_s - began_s, load_s)


def _load_back(
    store: KVStore, keys: list[OffloadKey], rows: list[bytes]
) -> tuple[str | None, float]:
    loaded = [bytearray(store.chunk_bytes) for _ in keys]
    began_s = time.monotonic()
    count = store.get(keys, loaded)
    load_s = time.monotonic() - began_s
    if count < len(keys):
        return f"only {count} of {len(keys)} chunks came back", load_s
    wrong = sum(bytes(row) != expected for row, expected in zip(loaded, rows, strict=True))
    return (f"{wrong} chunks came back with other bytes" if wrong else None), load_s
