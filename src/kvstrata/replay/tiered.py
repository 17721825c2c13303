"""Replay a trace through a manager with all its tiers, real or modelled, under virtual time."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final

from kvstrata.build import build_manager, num_primary_chunks, tier_num_chunks
from kvstrata.core.clock import VirtualClock
from kvstrata.core.config import Config, TierConfig
from kvstrata.core.errors import ConfigError
from kvstrata.core.events import PRIMARY_MEDIUM
from kvstrata.core.keys import OffloadKey
from kvstrata.core.manager import OffloadingManager
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.core.results import LoadStoreSpec
from kvstrata.core.stats import Stats
from kvstrata.replay.modelled_tier import MODELLED
from kvstrata.replay.simulate import Partial, Progress, UnbackedSlots
from kvstrata.replay.tally import Served, TierTally
from kvstrata.replay.trace import Trace, TraceRequest

POLL_S: Final = 0.0002
_MODELLED_CLASS: Final = "kvstrata.replay.modelled_tier:ModelledTier"
_REQUESTS_PER_REPORT: Final = 256
_SPEEDS: Final[dict[str, dict[str, object]]] = {
    "memory": {"read_bytes_per_s": "10GB", "write_bytes_per_s": "10GB", "latency_s": 0.00001},
    "fs": {"read_bytes_per_s": "5GB", "write_bytes_per_s": "2GB", "latency_s": "0.2ms"},
    "object": {"read_bytes_per_s": "1GB", "write_bytes_per_s": "500MB", "latency_s": "50ms"},
    "p2p": {"read_bytes_per_s": "2GB", "write_bytes_per_s": "2GB", "latency_s": "1ms"},
}
"""What `as_modelled` assumes of tiers that say nothing of their speed."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What turns counts into time and money.

    Attributes:
        prefill_tokens_per_s: How fast the engine computes a prompt; None: no times are given.
        put_price: Of one request that writes to an object store.
        get_price: Of one that reads.
    """

    prefill_tokens_per_s: float | None = None
    put_price: float = 5e-6
    get_price: float = 4e-7


def as_modelled(
    config: Config, chunk_bytes: int, speed: Mapping[str, object] | None = None
) -> Config:
    """Return the settings with each tier replaced by a modelled one of the same capacity.

    Args:
        config: The settings.
        chunk_bytes: Payload of one chunk.
        speed: Settings of a modelled tier, for all; None: what is usual for a tier of the type.

    Raises:
        ConfigError: A tier has no bound.
    """
    tiers = []
    for index, tier in enumerate(config.tiers):
        if is_modelled(tier):
            tiers.append(replace(tier, type=_MODELLED_CLASS))
            continue
        num_chunks = tier_num_chunks(tier, index, chunk_bytes)
        if num_chunks is None:
            raise ConfigError(f"tiers[{index}]", "needs max_bytes to be modelled")
        usual = _SPEEDS.get(tier.type, {})
        settings = {**(usual if speed is None else speed), "max_chunks": num_chunks}
        settings["stands_for"] = tier.type
        tiers.append(replace(tier, type=_MODELLED_CLASS, settings=settings))
    return replace(config, tiers=tuple(tiers))


def _in_order(config: Config) -> Config:
    """Let real files be written one after the other, unless settings say how many threads do.

    Otherwise the order of a request's chunks, and with it what leaves first, is left to chance.
    """
    tiers = list(config.tiers)
    for index, tier in enumerate(tiers):
        if tier.type == "fs":
            tiers[index] = replace(tier, settings={"num_threads": 1, **tier.settings})
    return replace(config, tiers=tuple(tiers))


def is_modelled(tier: TierConfig) -> bool:
    """Say whether a tier of the settings moves no bytes."""
    return tier.type in {MODELLED, _MODELLED_CLASS}


@dataclass(slots=True, eq=False)
class _Live:
    """A request that has arrived and is not served yet."""

    request: TraceRequest
    ctx: ReqContext


class TieredReplay:
    """One replay: requests wait for tiers side by side, as in an engine; real tiers one by one."""

    def __init__(
        self, trace: Trace, config: Config, chunk_bytes: int, *, partial: Partial = Partial.SKIP
    ) -> None:
        """Build the manager of these settings; it is shut down by `run`."""
        self._trace = trace
        self._chunk_bytes = chunk_bytes
        self._skips = partial is Partial.SKIP
        self._is_real = not all(map(is_modelled, config.tiers))
        config = _in_order(config) if self._is_real else as_modelled(config, chunk_bytes)
        self._config = replace(config, tokens_per_chunk=trace.tokens_per_chunk)
        self.num_chunks = num_primary_chunks(self._config, chunk_bytes)
        self._clock = VirtualClock()
        self._manager = self._build()
        self._waiting: list[_Live] = []
        self._new: list[str] = []
        self._arrived_s = 0.0  # when the latest request came
        self.tally = TierTally(trace.tokens_per_chunk)

    def _build(self) -> OffloadingManager:
        slots = None if self._is_real else UnbackedSlots(self.num_chunks, self._chunk_bytes)
        return build_manager(
            self._config,
            chunk_bytes=self._chunk_bytes,
            namespace="replay",
            clock=self._clock,
            slots=slots,
        )

    def run(self, on_progress: Progress = lambda _: None) -> Stats:
        """Replay all requests; return the manager's counts after the last copy."""
        try:
            for number, request in enumerate(self._trace.requests()):
                if number % _REQUESTS_PER_REPORT == 0:
                    on_progress(number)
                self._pass_time(request.at_s)
                self._begin(request, str(number))
            self._finish()
            return self._manager.get_stats()
        finally:
            self._manager.shutdown()

    def _pass_time(self, until_s: float) -> None:
        """Go on to a time, with a step for everything that ends or is due on the way."""
        clock = self._clock
        while (alarm_s := clock.take_alarm(until_s)) is not None:
            clock.at_s = max(clock.at_s, alarm_s)
            self._step()
        clock.at_s = max(clock.at_s, until_s)

    def _begin(self, request: TraceRequest, req_id: str) -> None:
        live = _Live(request, ReqContext(req_id))
        self._arrived_s = request.at_s
        self._manager.on_new_request(live.ctx)
        self._new.append(req_id)
        if not self._try_serve(live):
            self._waiting.append(live)
            if not self._is_real:
                self._clock.set_alarm(self._clock.at_s + self._config.max_wait_s)
        self._end_step()
        if self._is_real:
            self._wait_for_real()

    def _step(self) -> None:
        self._waiting = [live for live in self._waiting if not self._try_serve(live)]
        self._end_step()

    def _end_step(self) -> None:
        self._manager.on_schedule_end(ScheduleEndContext(tuple(self._new), ()))
        self._new.clear()
        for event in self._manager.take_events():
            self.tally.ages.note(event, self._arrived_s)

    def _wait_for_real(self) -> None:
        """Take steps while real tiers work; for the trace they take no time, up to the limit."""
        began_s = time.perf_counter()
        while self._waiting or self._manager.has_pending_work():
            time.sleep(POLL_S)
            if self._waiting and time.perf_counter() - began_s > self._config.max_wait_s:
                self._clock.at_s += self._config.max_wait_s
            self._step()

    def _finish(self) -> None:
        """End what is under way when the last request has come."""
        if self._is_real:
            self._wait_for_real()
            return
        while self._waiting or self._manager.has_pending_work():
            alarm_s = self._clock.take_alarm(inf)
            self._clock.at_s = max(
                self._clock.at_s, self._clock.at_s + 1.0 if alarm_s is None else alarm_s
            )
            self._step()

    def _try_serve(self, live: _Live) -> bool:
        """Serve a request unless it has to wait; say whether it was served."""
        manager, ctx, keys = self._manager, live.ctx, live.request.keys
        num_hits = manager.lookup(keys, ctx)
        if num_hits is None:
            return False
        hits = keys[:num_hits]
        media = manager.media_of(hits, ctx)
        storable = keys[:-1] if self._skips and live.request.is_partial else keys
        manager.touch(storable, ctx)
        if hits:
            spec = manager.prepare_load(hits, ctx)
            self._check_bytes(hits, spec)
            manager.complete_load(hits, ctx)
        num_stored = self._store(storable[num_hits:], ctx)
        manager.on_request_finished(ctx)
        at_s = live.request.at_s
        wait_s = max(0.0, self._clock.at_s - at_s)
        served = Served(at_s, live.request.num_tokens, keys, media, num_stored, wait_s)
        self.tally.add(served)
        return True

    def _store(self, keys: list[OffloadKey], ctx: ReqContext) -> int:
        output = self._manager.prepare_store(keys, ctx) if keys else None
        if output is None or not output.keys_to_store:
            return 0
        if self._is_real:
            for key, slot in zip(output.keys_to_store, output.store_spec.slots, strict=True):
                self._manager.slots[slot][:] = self._bytes_of(key)
        self._manager.complete_store(output.keys_to_store, ctx)
        return len(output.keys_to_store)

    def _check_bytes(self, keys: Sequence[OffloadKey], spec: LoadStoreSpec) -> None:
        """Compare what was loaded, byte for byte, where there are bytes."""
        if self._is_real:
            for key, slot in zip(keys, spec.slots, strict=True):
                assert self._manager.slots[slot] == self._bytes_of(key), f"{key.hex()} is wrong"

    def _bytes_of(self, key: OffloadKey) -> bytes:
        return (key * (self._chunk_bytes // len(key) + 1))[: self._chunk_bytes]


def replay_config(
    trace: Trace,
    config: Config,
    chunk_bytes: int,
    *,
    assumptions: Assumptions | None = None,
    partial: Partial = Partial.SKIP,
    on_progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Replay a trace through the manager of these settings; return all that was counted.

    Tiers of the type "modelled" move no bytes; if all are such, neither does the primary. Real
    tiers get real bytes, which are compared when they come back.

    Raises:
        ConfigError: A setting is wrong.
    """
    assumptions = assumptions or Assumptions(config.prefill_tokens_per_s)
    began_s = time.perf_counter()
    run = TieredReplay(trace, config, chunk_bytes, partial=partial)
    stats = run.run(on_progress)
    run_s = time.perf_counter() - began_s
    tally = run.tally
    seconds = tally.last_s - (tally.first_s or 0.0)
    tiers = {PRIMARY_MEDIUM: {**tally.medium_json(), **_primary_json(stats, chunk_bytes)}}
    for tier in config.tiers:
        counts = _tier_json(tier, stats.tiers[tier.name], seconds, assumptions)
        tiers[tier.name] = {**tally.medium_json(tier.name), **counts}
    return {
        "policy": config.primary.policy,
        "num_chunks": run.num_chunks,
        "chunk_bytes": chunk_bytes,
        "requests": tally.num_requests,
        "blocks": tally.num_blocks,
        "hits": tally.num_hits,
        "hit_ratio": tally.num_hits / max(1, tally.num_blocks),
        "token_hit_ratio": tally.num_hit_tokens / max(1, tally.num_tokens),
        "writes": tally.num_writes,
        "writes_per_100": 100 * tally.num_writes / max(1, tally.num_blocks),
        "refused": int(stats["refused_chunks"]),
        "seconds": seconds,
        "accesses_per_s": tally.num_blocks / max(run_s, 1e-9),
        "ttft": _ttft_json(tally, assumptions),
        "tiers": tiers,
        "timeline": tally.timeline.as_json(),
    }


def _primary_json(stats: Stats, chunk_bytes: int) -> dict[str, float]:
    num_promoted = sum(tier["loaded_chunks"] for tier in stats.tiers.values())
    return {
        "num_resident": stats["num_resident"],
        "written_bytes": (stats["stored_chunks"] + num_promoted) * chunk_bytes,
        "read_bytes": stats["loaded_chunks"] * chunk_bytes,
        "evicted": stats["evicted_chunks"],
        "refused": stats["refused_chunks"],
    }


def _tier_json(
    tier: TierConfig, stats: Stats, seconds: float, assumptions: Assumptions
) -> dict[str, float]:
    gauges, counters = stats.gauges, stats.counters
    written_bytes, max_bytes = stats["stored_bytes"], gauges.get("max_bytes") or 0
    per_day_bytes = written_bytes * 86_400 / max(seconds, 1.0)
    counts = {
        "num_resident": gauges.get("num_resident", 0),
        "written_bytes": written_bytes,
        "read_bytes": stats["loaded_bytes"],
        "evicted": counters.get("evicted_chunks", 0),
        "refused": counters.get("refused_chunks", 0),
        "dropped": counters.get("dropped_store_chunks", 0),
        "written_bytes_per_day": per_day_bytes,
        "drive_writes_per_day": per_day_bytes / max_bytes if max_bytes else 0.0,
    }
    if "object" in {tier.type, tier.settings.get("stands_for")}:
        num_puts, num_gets = stats["stored_chunks"], stats["loaded_chunks"]
        counts |= {
            "put_requests": num_puts,
            "get_requests": num_gets,
            "request_cost": num_puts * assumptions.put_price + num_gets * assumptions.get_price,
        }
    return counts


def _ttft_json(tally: TierTally, assumptions: Assumptions) -> dict[str, float]:
    waits = {
        "num_waits": tally.num_waits,
        "wait_s": tally.wait_s,
        "wait_max_s": tally.wait_max_s,
    }
    rate = assumptions.prefill_tokens_per_s
    if not rate:
        return waits
    num, saved_s = max(1, tally.num_requests), tally.num_hit_tokens / rate - tally.wait_s
    return {
        **waits,
        "prefill_tokens_per_s": rate,
        "without_s": tally.num_tokens / rate / num,
        "saved_s": saved_s / num,
        "saved_in_all_s": saved_s,
    }
