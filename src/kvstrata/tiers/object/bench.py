"""Throughput of the object tier beside plain obstore loops, in the same run."""

import asyncio
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, Protocol

import obstore

from kvstrata.core.keys import JobId, OffloadKey, make_offload_key
from kvstrata.core.memory import SlotView
from kvstrata.core.results import LoadJob, StoreJob
from kvstrata.core.settings import parse_settings
from kvstrata.tiers.object.client import open_store
from kvstrata.tiers.object.settings import ObjectSettings
from kvstrata.tiers.object.tier import ObjectTier

NUM_REQUESTS: Final = 16
_TIMEOUT_S: Final = 600.0
_POLL_S: Final = 0.001
_NUM_LOADS: Final = 6  # of each in a round: they are short, and so more easily disturbed


@dataclass(frozen=True, slots=True)
class ObjectBench:
    """Medians, payload bytes only.

    The plain figures are those of the faster of two loops with as many requests at one time: one
    of coroutines, one of threads. They put rows of the same memory, and get objects and copy them
    into the rows, without header, checksum, index or deadline. All write new objects, into folders
    that have been there since their first round. In memory obstore keeps the buffer that it is
    given, so that a put moves no byte: there the loops put a copy of the row, as a store would.
    """

    num_chunks: int
    chunk_bytes: int
    num_requests: int
    store_GBps: float  # noqa: N815
    load_GBps: float  # noqa: N815
    plain_store_GBps: float  # noqa: N815
    plain_load_GBps: float  # noqa: N815


def run_bench(
    slots: SlotView,
    settings: Mapping[str, Any],
    num_rounds: int = 5,
    num_requests: int = NUM_REQUESTS,
) -> ObjectBench:
    """Store and load every slot through a tier and through plain loops, turn by turn.

    All that was written is removed again.

    Raises:
        ConfigError: A setting is wrong or the store can't be used.
        RuntimeError: A chunk did not arrive.
    """
    settings = {**settings, "num_requests_max": num_requests, "store_timeout_s": _TIMEOUT_S}
    settings |= {"load_timeout_s": _TIMEOUT_S, "inflight_bytes_max": "64GiB"}
    settings |= {"num_queued_stores_max": len(slots)}
    tier = _TierCopies(ObjectTier(slots, **settings), len(slots))
    loops: list[_Loop] = [
        tier,
        _Coroutines(slots, settings, num_requests),
        _Threads(slots, settings, num_requests),
    ]
    speeds: defaultdict[tuple[_Loop, str], list[float]] = defaultdict(list)
    num_bytes = len(slots) * slots.chunk_bytes

    def measure(loop: _Loop, name: str, work: Callable[[], None]) -> None:
        started_s = time.perf_counter()
        work()
        speeds[loop, name].append(num_bytes / (time.perf_counter() - started_s) / 1e9)

    try:
        for round_number in range(num_rounds):
            turn = round_number % len(loops)
            in_turn = loops[turn:] + loops[:turn]
            for loop in in_turn:
                loop.begin()
                measure(loop, "store", loop.store)
            for loop in in_turn * _NUM_LOADS:
                measure(loop, "load", loop.load)
            for loop in loops:
                loop.delete()
    finally:
        for loop in loops:
            loop.close()
    middle = {each: median(found) for each, found in speeds.items()}
    figures = [middle[tier, name] for name in ("store", "load")]
    figures += [max(middle[loop, name] for loop in loops[1:]) for name in ("store", "load")]
    return ObjectBench(len(slots), slots.chunk_bytes, num_requests, *figures)


class _Loop(Protocol):
    def begin(self) -> None: ...
    def store(self) -> None: ...
    def load(self) -> None: ...
    def delete(self) -> None: ...
    def close(self) -> None: ...


class _TierCopies:
    def __init__(self, tier: ObjectTier, num_chunks: int) -> None:
        self._tier = tier
        self._num_chunks = num_chunks
        self._keys: list[OffloadKey] = []

    def begin(self) -> None:
        self._keys = [make_offload_key(os.urandom(32), 0) for _ in range(self._num_chunks)]

    def store(self) -> None:
        self._tier.submit_store(StoreJob(JobId(1), self._keys, range(len(self._keys))))
        self._finish()

    def load(self) -> None:
        self._tier.submit_load(LoadJob(JobId(2), self._keys, range(len(self._keys))))
        self._finish()

    def delete(self) -> None:
        num_deleted = self._tier.get_stats()["deleted_chunks"] + self._num_chunks
        self._tier.delete(self._keys)
        until_s = time.monotonic() + _TIMEOUT_S
        while self._tier.get_stats()["deleted_chunks"] < num_deleted:  # not into the next round
            if time.monotonic() > until_s:
                raise RuntimeError(f"chunks were not removed: {self._tier.get_stats()}")
            time.sleep(_POLL_S)

    def close(self) -> None:
        self._tier.shutdown()

    def _finish(self) -> None:
        self._tier.drain_jobs(_TIMEOUT_S)
        for result in self._tier.get_finished_jobs():
            if result.failed:
                raise RuntimeError(f"{len(result.failed)} chunks failed: {self._tier.get_stats()}")


class _Plain:
    def __init__(self, slots: SlotView, settings: Mapping[str, Any], num_requests: int) -> None:
        self._slots = slots
        self._num_requests = num_requests
        parsed = parse_settings(ObjectSettings, settings, "tier")
        self._store: Any = open_store(parsed, "tier")
        self._keeps_buffers = parsed.scheme == "memory"
        self._round = ""

    def _path(self, slot: int) -> str:
        return f"plain/{slot % 256:02x}/{self._round}{slot}"

    def _body(self, slot: int) -> bytes | memoryview:
        row = self._slots[slot]
        return bytes(row) if self._keeps_buffers else row

    def begin(self) -> None:
        self._round = os.urandom(16).hex()

    def delete(self) -> None:
        obstore.delete(self._store, [self._path(slot) for slot in range(len(self._slots))])


class _Threads(_Plain):
    def __init__(self, slots: SlotView, settings: Mapping[str, Any], num_requests: int) -> None:
        super().__init__(slots, settings, num_requests)
        self._pool = ThreadPoolExecutor(num_requests)

    def store(self) -> None:
        list(self._pool.map(self._put, range(len(self._slots))))

    def load(self) -> None:
        list(self._pool.map(self._get, range(len(self._slots))))

    def close(self) -> None:
        self._pool.shutdown()

    def _put(self, slot: int) -> None:
        obstore.put(self._store, self._path(slot), self._body(slot), use_multipart=False)

    def _get(self, slot: int) -> None:
        self._slots[slot][:] = memoryview(obstore.get(self._store, self._path(slot)).bytes())


class _Coroutines(_Plain):
    def __init__(self, slots: SlotView, settings: Mapping[str, Any], num_requests: int) -> None:
        super().__init__(slots, settings, num_requests)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def store(self) -> None:
        self._run(self._put)

    def load(self) -> None:
        self._run(self._get)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, one: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        async def run() -> None:
            gate = asyncio.Semaphore(self._num_requests)

            async def gated(slot: int) -> None:
                async with gate:
                    await one(slot)

            await asyncio.gather(*map(gated, range(len(self._slots))))

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    async def _put(self, slot: int) -> None:
        body = self._body(slot)
        await obstore.put_async(self._store, self._path(slot), body, use_multipart=False)

    async def _get(self, slot: int) -> None:
        found = await obstore.get_async(self._store, self._path(slot))
        self._slots[slot][:] = memoryview(await found.bytes_async())
