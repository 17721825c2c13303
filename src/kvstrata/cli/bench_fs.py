"""`kvstrata bench fs`: how fast the file-system tier is here, and what fio gets from the disk."""

import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Final, TypeVar

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from kvstrata.cli.bench_fs_adopt import measure_adoption
from kvstrata.core.clock import SystemClock
from kvstrata.core.keys import JobId, OffloadKey, make_offload_key
from kvstrata.core.request import ScheduleEndContext
from kvstrata.core.results import JobResult, LoadJob, StoreJob
from kvstrata.core.settings import parse_bytes
from kvstrata.core.tier import TierEnv
from kvstrata.primary.region import HostRegion, why_no_huge_pages
from kvstrata.tiers.fs import FsTier

T = TypeVar("T")

JOB_CHUNKS: Final = 64
STEP_S: Final = 0.001
_EMPTY_STEP: Final = ScheduleEndContext((), ())


@dataclass(slots=True)
class Figures:
    """What one run found out; rates are medians over its rounds, in 10**9 bytes a second."""

    chunk_bytes: int
    num_chunks: int
    num_rounds: int
    num_threads: int
    shared_memory: bool = False
    direct_io: bool = False
    store_GBps: float = 0.0  # noqa: N815 - the name is part of the output's format
    load_GBps: float = 0.0  # noqa: N815
    fio_write_GBps: float | None = None  # noqa: N815
    fio_read_GBps: float | None = None  # noqa: N815
    max_call_ms: float = 0.0
    max_call: str = ""
    bytes_verified: int = 0
    num_adopted: int = 0
    adopt_s: float | None = None


@dataclass(slots=True)
class _Caller:
    """Calls the tier as a scheduler does, and notes the longest call."""

    max_call_s: float = 0.0
    max_call: str = ""

    def call(self, function: Callable[..., T], *args: object) -> T:
        started_s = time.perf_counter()
        result = function(*args)
        took_s = time.perf_counter() - started_s
        if took_s > self.max_call_s:
            self.max_call_s, self.max_call = took_s, function.__name__
        return result


@dataclass(slots=True)
class _Round:
    """One namespace: its tier, keys and the bytes that have to come back."""

    region: HostRegion
    tier: FsTier
    caller: _Caller
    seed: int
    keys: list[OffloadKey] = field(default_factory=list)

    def fill(self) -> None:
        for i in range(self.region.num_slots):
            self.region[i][:] = self._chunk(i)
            self.keys.append(make_offload_key(b"%d/%d" % (self.seed, i), 0))

    def verify(self) -> int:
        for i in range(self.region.num_slots):
            if self.region[i] != self._chunk(i):
                raise SystemExit(f"chunk {i} came back with wrong bytes")
        return self.region.num_slots * self.region.chunk_bytes

    def clear(self) -> None:
        for i in range(self.region.num_slots):
            self.region[i][:] = bytes(self.region.chunk_bytes)

    def store(self) -> float:
        return self._run(StoreJob, self.tier.submit_store)

    def load(self) -> float:
        return self._run(LoadJob, self.tier.submit_load)

    def _run(self, kind: type[StoreJob | LoadJob], submit: Callable[..., None]) -> float:
        """Move all chunks in steps of a scheduler; return bytes a second."""
        starts = range(0, len(self.keys), JOB_CHUNKS)
        jobs = [
            kind(JobId(start), self.keys[start : start + JOB_CHUNKS],
                 range(start, min(start + JOB_CHUNKS, len(self.keys))))
            for start in starts
        ]  # fmt: skip
        results: list[JobResult] = []
        started_s = time.perf_counter()
        for job in jobs:
            self.caller.call(submit, job)
        while len(results) < len(jobs):
            self.caller.call(self.tier.on_schedule_end, _EMPTY_STEP)
            results += self.caller.call(self.tier.get_finished_jobs)
            time.sleep(STEP_S)
        took_s = time.perf_counter() - started_s
        if any(result.failed for result in results):
            raise SystemExit(f"{sum(len(r.failed) for r in results)} chunks failed")
        return len(self.keys) * self.region.chunk_bytes / took_s

    def _chunk(self, i: int) -> memoryview:
        """Return bytes that follow from round and number, none like another."""
        num_words = -(-self.region.chunk_bytes // 8)
        words = np.random.default_rng(self.seed).integers(0, 2**64, num_words, np.uint64)
        return memoryview((words + np.uint64(i)).tobytes())[: self.region.chunk_bytes]


def _fio(kind: str, directory: Path, chunk_bytes: int, num_chunks: int, num_jobs: int) -> float:
    """Return bytes a second of fio's own sequential direct I/O in files of the same total size."""
    command = [
        "fio", f"--name={directory.name}", f"--directory={directory}", f"--rw={kind}",
        f"--bs={-(-chunk_bytes // 4096) * 4096}", f"--size={chunk_bytes * num_chunks // num_jobs}",
        f"--numjobs={num_jobs}", "--thread", "--direct=1", "--ioengine=psync", "--invalidate=1",
        "--group_reporting", "--output-format=json",
    ]  # fmt: skip
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(found.stdout)["jobs"][0][kind]["bw_bytes"])


def run_bench(
    root: Path,
    chunk_bytes: int,
    num_chunks: int,
    num_rounds: int,
    num_threads: int,
    *,
    shared: bool = False,
    num_adopted: int = 0,
) -> Figures:
    """Measure in rounds: fio writes, the tier stores, fio reads, the tier loads, all is verified.

    Works in a directory of its own below `root`, and removes it in the end.
    """
    figures = Figures(chunk_bytes, num_chunks, num_rounds, num_threads, shared)
    figures.num_adopted = num_adopted
    caller = _Caller()
    rates: dict[str, list[float]] = {"store": [], "load": [], "write": [], "read": []}
    region = HostRegion.create(num_chunks, chunk_bytes, shared=shared)
    root.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="kvstrata-bench-", dir=root))
    try:
        for number in range(num_rounds):
            env = TierEnv("fs", f"bench-{number}", SystemClock(), "bench")
            settings = {"root": place / "kv", "max_bytes": "unlimited", "num_threads": num_threads}
            tier = FsTier.from_config(region, settings, env)
            one = _Round(region, tier, caller, number)
            one.fill()
            has_fio = shutil.which("fio") is not None
            fresh = place / f"fio-{number}"  # old files would be overwritten, which is faster
            fresh.mkdir()
            measure = partial(
                _fio, directory=fresh, chunk_bytes=chunk_bytes, num_chunks=num_chunks,
                num_jobs=num_threads,
            )  # fmt: skip
            if has_fio:
                rates["write"].append(measure("write"))
            rates["store"].append(one.store())
            if has_fio:
                rates["read"].append(measure("read"))
            one.clear()
            rates["load"].append(one.load())
            figures.bytes_verified += one.verify()
            figures.direct_io = bool(tier.get_stats()["direct_io"])
            tier.shutdown()
        if num_adopted:
            figures.adopt_s = round(measure_adoption(place / "adopt", region, num_adopted), 3)
    finally:
        shutil.rmtree(place)
        region.close()
    figures.store_GBps, figures.load_GBps = _median(rates["store"]), _median(rates["load"])
    if rates["write"]:
        figures.fio_write_GBps = _median(rates["write"])
        figures.fio_read_GBps = _median(rates["read"])
    figures.max_call_ms, figures.max_call = caller.max_call_s * 1000, caller.max_call
    return figures


def _median(rates: list[float]) -> float:
    return round(statistics.median(rates) / 1e9, 3)


def _show(figures: Figures) -> None:
    table = Table(title=f"{figures.num_chunks} chunks of {figures.chunk_bytes} bytes")
    for column in ("", "kvstrata GB/s", "fio GB/s", "share"):
        table.add_column(column, justify="right")
    for name, ours, theirs in (
        ("store", figures.store_GBps, figures.fio_write_GBps),
        ("load", figures.load_GBps, figures.fio_read_GBps),
    ):
        shares = ("-", "fio is not installed") if theirs is None else (
            f"{theirs:.3f}", f"{ours / theirs:.0%}"
        )  # fmt: skip
        table.add_row(name, f"{ours:.3f}", *shares)
    Console().print(table)
    print(f"longest call: {figures.max_call_ms:.2f} ms ({figures.max_call})")
    if figures.adopt_s is not None:
        print(f"start on {figures.num_adopted} chunks: {figures.adopt_s:.3f} s")
    print(f"verified: {figures.bytes_verified} bytes, direct I/O: {figures.direct_io}")
    if problem := why_no_huge_pages(shared=figures.shared_memory):
        print(f"without huge pages: {problem}")


def fs(
    root: Annotated[Path, typer.Option(help="A directory on the disk to measure.")],
    chunk_bytes: Annotated[str, typer.Option(help='Bytes of a chunk, such as "2MiB".')] = "2MiB",
    chunks: Annotated[int, typer.Option(min=1, help="Chunks in a round.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Medians are of so many rounds.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the tier, and of fio.")] = 8,
    *,
    shared_memory: Annotated[
        bool,
        typer.Option(
            "--shared-memory",
            help="Memory as an engine's workers map it, instead of kvstrata.open's own.",
        ),
    ] = False,
    adopt_chunks: Annotated[
        int, typer.Option(min=0, help="Then start on so many chunks; 0: don't.")
    ] = 10_000,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Store all, drop, load all and verify every byte, next to fio's direct I/O in the same run."""
    num_bytes = parse_bytes(chunk_bytes, "--chunk-bytes")
    figures = run_bench(
        root, num_bytes, chunks, rounds, threads, shared=shared_memory, num_adopted=adopt_chunks
    )
    if json_output:
        print(json.dumps(asdict(figures)))
    else:
        _show(figures)
