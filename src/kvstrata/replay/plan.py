"""Say what sizes and policies would bring on a trace, and what the next GiB would buy."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Final

from kvstrata.build import num_primary_chunks, tier_num_chunks
from kvstrata.core.config import Config
from kvstrata.core.events import PRIMARY_MEDIUM
from kvstrata.replay.bounds import offline_bound
from kvstrata.replay.simulate import replay_primary
from kvstrata.replay.tiered import as_modelled, replay_config
from kvstrata.replay.trace import Trace

GIB: Final = 2**30
DISK: Final = "disk"
Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one primary and of the disk below it, 0 for none; what they hold when full."""

    ram_bytes: int
    disk_bytes: int
    ram_chunks: int
    disk_chunks: int

    @property
    def num_chunks(self) -> int:
        """Chunks that both hold together at most."""
        return self.ram_chunks + self.disk_chunks


@dataclass(frozen=True, slots=True)
class Cell:
    """What one policy does with one pair of sizes; ratios are of the trace's blocks.

    Attributes:
        policy: Of the primary.
        ram_bytes, disk_bytes: The sizes.
        ram_chunks, disk_chunks, ram_tokens, disk_tokens: What a running manager holds when full.
        hit_ratio, ram_hit_ratio, disk_hit_ratio: Blocks that need not be computed, and from where.
        bound: Hit ratio that nothing of this size could exceed.
        hit_tokens_per_s: Tokens that need not be computed, per second of the trace.
        disk_bytes_per_day: Bytes written to the disk, per day.
    """

    policy: str
    ram_bytes: int
    disk_bytes: int
    ram_chunks: int
    disk_chunks: int
    ram_tokens: int
    disk_tokens: int
    hit_ratio: float
    ram_hit_ratio: float
    disk_hit_ratio: float
    bound: float
    hit_tokens_per_s: float
    disk_bytes_per_day: float


def config_of(policy: str, ram_bytes: int, disk_bytes: int) -> Config:
    """Return the settings that a cell stands for; the disk's directory is a placeholder."""
    disk = {"type": "fs", "name": DISK, "root": "unused", "max_bytes": disk_bytes}
    primary = {"bytes": ram_bytes, "policy": policy}
    return Config.parse({"primary": primary, "tiers": [disk] if disk_bytes else []})


def sizes_of(ram_bytes: int, disk_bytes: int, chunk_bytes: int) -> Sizes:
    """Return what sizes hold, worked out by the code that serves.

    Raises:
        ConfigError: Not even one chunk fits.
    """
    config = config_of("lru", ram_bytes, disk_bytes)
    disk_chunks = tier_num_chunks(config.tiers[0], 0, chunk_bytes) if config.tiers else 0
    ram_chunks = num_primary_chunks(config, chunk_bytes)
    return Sizes(ram_bytes, disk_bytes, ram_chunks, disk_chunks or 0)


class Planner:
    """Replays a trace once for each policy and pair of sizes."""

    def __init__(self, trace: Trace, chunk_bytes: int, told: Told = lambda _: None) -> None:
        """Take the trace and the bytes of one of its blocks; `told` hears what is being done."""
        self._trace = trace
        self._chunk_bytes = chunk_bytes
        self._told = told
        self._bound = cache(self._find_bound)

    def _find_bound(self, num_chunks: int) -> int:
        self._told(f"bound of {num_chunks:,} chunks")
        return offline_bound(self._trace, num_chunks).num_hits

    def cells(
        self, policies: Sequence[str], rams_bytes: Sequence[int], disks_bytes: Sequence[int]
    ) -> Iterator[Cell]:
        """Yield a cell for each combination, sizes ascending within a policy.

        Raises:
            ConfigError: A size holds no chunk, or there is no such policy.
        """
        for policy in policies:
            for disk_bytes in sorted(set(disks_bytes)):
                for ram_bytes in sorted(set(rams_bytes)):
                    yield self._cell(policy, sizes_of(ram_bytes, disk_bytes, self._chunk_bytes))

    def _cell(self, policy: str, sizes: Sizes) -> Cell:
        self._told(f"{policy}: {sizes.ram_chunks:,} + {sizes.disk_chunks:,} chunks")
        if sizes.disk_chunks:
            config = config_of(policy, sizes.ram_bytes, sizes.disk_bytes)
            model = as_modelled(config, self._chunk_bytes)
            found = replay_config(self._trace, model, self._chunk_bytes)
        else:
            found = replay_primary(self._trace, policy, sizes.ram_chunks).as_json()
        num_blocks, span = max(1, found["blocks"]), self._trace.tokens_per_chunk
        seconds = max(1.0, found["seconds"])
        disk = found["tiers"].get(DISK, {})
        return Cell(
            policy=policy,
            ram_bytes=sizes.ram_bytes,
            disk_bytes=sizes.disk_bytes,
            ram_chunks=sizes.ram_chunks,
            disk_chunks=sizes.disk_chunks,
            ram_tokens=sizes.ram_chunks * span,
            disk_tokens=sizes.disk_chunks * span,
            hit_ratio=found["hits"] / num_blocks,
            ram_hit_ratio=found["tiers"][PRIMARY_MEDIUM]["hits"] / num_blocks,
            disk_hit_ratio=disk.get("hits", 0) / num_blocks,
            bound=self._bound(sizes.num_chunks) / num_blocks,
            hit_tokens_per_s=found["hits"] * span / seconds,
            disk_bytes_per_day=disk.get("written_bytes", 0) * 86_400 / seconds,
        )


def next_gib(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Say per policy what a GiB more brings, from each size to the next one.

    `hit_points` are per cent of the trace's blocks for each GiB; `hit_tokens_per_s` likewise.
    """
    steps: list[dict[str, Any]] = []
    for what, other in (("ram", "disk"), ("disk", "ram")):
        lines: dict[tuple[str, int], list[Cell]] = {}
        for cell in cells:
            lines.setdefault((cell.policy, getattr(cell, f"{other}_bytes")), []).append(cell)
        for (policy, other_bytes), line in lines.items():
            line.sort(key=lambda cell: getattr(cell, f"{what}_bytes"))
            for less, more in pairwise(line):
                from_bytes, to_bytes = (getattr(each, f"{what}_bytes") for each in (less, more))
                num_gib = (to_bytes - from_bytes) / GIB
                points = 100 * (more.hit_ratio - less.hit_ratio) / num_gib
                rate = (more.hit_tokens_per_s - less.hit_tokens_per_s) / num_gib
                steps.append(
                    {
                        "of": what,
                        "policy": policy,
                        "from_bytes": from_bytes,
                        "to_bytes": to_bytes,
                        f"{other}_bytes": other_bytes,
                        "hit_points": points,
                        "hit_tokens_per_s": rate,
                    }
                )
    return steps


def as_json(cells: Sequence[Cell], chunk_bytes: int, tokens_per_chunk: int) -> dict[str, Any]:
    """Return all numbers by name."""
    return {
        "chunk_bytes": chunk_bytes,
        "tokens_per_chunk": tokens_per_chunk,
        "cells": [asdict(cell) for cell in cells],
        "next_gib": next_gib(cells),
    }
