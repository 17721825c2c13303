"""How long the file-system tier takes to start on a root that is full of chunks."""

import time
from pathlib import Path

from kvstrata.core.clock import SystemClock
from kvstrata.core.keys import make_offload_key
from kvstrata.core.memory import SlotView
from kvstrata.core.tier import TierEnv
from kvstrata.tiers.fs import FsTier
from kvstrata.tiers.fs.layout import ChunkDir

_NAMESPACE = "bench-adopt"


def measure_adoption(root: Path, slots: SlotView, num_chunks: int) -> float:
    """Return the seconds until a new tier knows `num_chunks` files; they stay below `root`.

    The files have their names and sizes and no content, which takes no space: a start opens none.

    Raises:
        SystemExit: The tier did not find all of them.
    """
    chunks = ChunkDir.of(_NAMESPACE, slots.chunk_bytes)
    for i in range(num_chunks):
        path = root / chunks.path_of(make_offload_key(b"adopt %d" % i, 0))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(chunks.file_bytes)
    env = TierEnv("fs", _NAMESPACE, SystemClock(), "bench")
    started_s = time.perf_counter()
    tier = FsTier.from_config(slots, {"root": root, "max_bytes": "unlimited"}, env)
    took_s = time.perf_counter() - started_s
    num_found = int(tier.get_stats()["num_resident"])
    tier.shutdown()
    if num_found != num_chunks:
        raise SystemExit(f"{num_found} of {num_chunks} chunks were adopted")
    return took_s
