"""A file-system tier on a hooked disk, with slots whose bytes follow from their keys."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstrata.core.keys import OffloadKey
from kvstrata.core.request import ReqContext
from kvstrata.core.results import JobResult, LookupResult
from kvstrata.core.tier import TierEnv
from kvstrata.testing import FakeClock, FakeRegion, numbered_key, pattern, poison
from kvstrata.testing.tier_calls import IDLE_STEP, load, look_up, pause, store
from kvstrata.tiers.fs import FsTier
from kvstrata.tiers.fs.ledger import LEDGER_BYTES
from tests.disks import HookedDisk

CHUNK_BYTES = 10_000  # in a file of 4096 + 12288 bytes
FILE_BYTES = 16_384
NUM_SLOTS = 64
CTX = ReqContext("test")
MEMORY_DIR = Path("/dev/shm")


@contextmanager
def quick_dir() -> Iterator[Path]:
    """Make a directory in memory where the system has such a place, and remove it."""
    path = Path(tempfile.mkdtemp(dir=MEMORY_DIR if MEMORY_DIR.is_dir() else None))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def cap(num_chunks: int) -> int:
    """Return the `max_bytes` that holds exactly so many chunks."""
    return num_chunks * FILE_BYTES + LEDGER_BYTES


class World:
    """One root; `tier` is the tier on it, `disk` its disk. Slot i holds key i's bytes, i < 32."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = FakeClock()
        self.slots = FakeRegion(NUM_SLOTS, CHUNK_BYTES)
        self.keys = [numbered_key(i) for i in range(NUM_SLOTS)]
        for i in range(32):
            self.slots[i][:] = pattern(self.keys[i], CHUNK_BYTES)
        self.tiers: list[FsTier] = []
        self.disk: HookedDisk
        self._num_jobs = 0

    @property
    def tier(self) -> FsTier:
        """The tier opened last."""
        return self.tiers[-1]

    def open(self, namespace: str = "test", /, **settings: object) -> FsTier:
        """Open one more tier on the root, with a disk of its own."""
        self.disk = HookedDisk(self.root)
        env = TierEnv("fs", namespace, self.clock, "tiers[0]")
        settings = {"root": self.root, "max_bytes": cap(32), **settings}
        self.tiers.append(FsTier(self.slots, env=env, disk=self.disk, **settings))
        return self.tier

    def reopen(self, **settings: object) -> FsTier:
        """Shut the last tier down and open another."""
        self.tier.shutdown()
        return self.open(**settings)

    def job_id(self) -> int:
        """Return a number that no job has had."""
        self._num_jobs += 1
        return self._num_jobs

    def store(self, *numbers: int, expires_at_s: list[float] | None = None) -> set[int]:
        """Store chunks from their slots; return those that failed."""
        chunks = {self.keys[i]: i for i in numbers}
        return self._failed(store(self.tier, self.job_id(), chunks, expires_at_s))

    def load(self, *numbers: int) -> set[int]:
        """Load chunks into poisoned slots, and compare; return those that failed."""
        return self._failed(self.load_job(*numbers))

    def load_job(self, *numbers: int) -> JobResult:
        """Load chunks as `load` does; return the result."""
        chunks = {self.keys[number]: 32 + i for i, number in enumerate(numbers)}
        for slot in chunks.values():
            poison(self.slots.row(slot))
        result = load(self.tier, self.job_id(), chunks)
        for key, slot in chunks.items():
            assert key in result.failed or self.slots[slot] == pattern(key, CHUNK_BYTES)
        return result

    def hits(self, *numbers: int) -> set[int]:
        """Return which of these chunks are found."""
        found = {i: look_up(self.tier, self.keys[i]) for i in numbers}
        return {i for i, answer in found.items() if answer is LookupResult.HIT}

    def settle(self) -> None:
        """End steps until upkeep has been done."""
        self.tier.on_schedule_end(IDLE_STEP)
        while not self.tier.is_idle():
            pause()

    def close(self) -> None:
        """Shut all tiers down."""
        for tier in self.tiers:
            tier.shutdown()

    def path_of(self, number: int) -> Path:
        """Return the file of a chunk."""
        (path,) = self.root.glob(f"v1-*/*/*/{self.keys[number].hex()}.chunk")
        return path

    def _failed(self, result: JobResult) -> set[int]:
        return {self.number_of(key) for key in result.failed}

    def number_of(self, key: OffloadKey) -> int:
        """Return a key's number."""
        return self.keys.index(key)
