"""The connector's counters as vLLM carries them from its scheduler to its `/metrics`."""

import time
from collections.abc import Mapping, Sized
from typing import Any, Final

from prometheus_client import Counter, Gauge
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvstrata.connector import OffloadingConnectorScheduler
from kvstrata.core.metrics import PRIMARY_METRICS, TIER_METRICS
from kvstrata.core.stats import Stats

PREFIX: Final = "vllm:kvstrata_"  # vLLM unregisters what starts with its own name
REPORT_S: Final = 0.5
HELP: Final = {metric.name: metric.help for metric in (*TIER_METRICS, *PRIMARY_METRICS)}
PRIMARY_TIER: Final = ""


class VllmStats(KVConnectorStats):  # type: ignore[misc]
    """Gauges as they are, counters as what came on top since the last report.

    `data` is `{"gauges": {tier: {name: value}}, "counters": {tier: {name: increase}}}`; the tier is
    empty for the primary and the connector itself.
    """

    data: dict[str, Any]

    @override
    def reset(self) -> None:
        self.data = {"gauges": {}, "counters": {}}

    @override
    def aggregate(self, other: KVConnectorStats) -> "VllmStats":
        for tier, gauges in other.data.get("gauges", {}).items():
            self.data.setdefault("gauges", {}).setdefault(tier, {}).update(gauges)
        for tier, counters in other.data.get("counters", {}).items():
            mine = self.data.setdefault("counters", {}).setdefault(tier, {})
            for name, value in counters.items():
                mine[name] = mine.get(name, 0) + value
        return self

    @override
    def reduce(self) -> dict[str, int | float]:
        names = ("primary_tokens", "tier_tokens", "stored_chunks", "evicted_chunks")
        counters = self.data.get("counters", {}).get(PRIMARY_TIER, {})
        return {f"kvstrata_{name}": counters[name] for name in names if name in counters}

    @override
    def is_empty(self) -> bool:
        return not self.data.get("gauges") and not self.data.get("counters")


class StatsReporter:
    """Turns the snapshots of manager and connector into increases, a few times a second."""

    def __init__(self, scheduler: OffloadingConnectorScheduler, live: Sized) -> None:
        """Take what has the numbers, and the live requests."""
        self._scheduler = scheduler
        self._live = live
        self._last: dict[tuple[str, str], float] = {}
        self._next_s = 0.0
        self._was_busy = True

    def take(self) -> VllmStats | None:
        """Return what changed since the last report; None between reports.

        When all work has just come to rest there is a report at once: no later step may bring it.
        """
        is_busy = bool(self._live) or self._scheduler.has_pending_work()
        came_to_rest = self._was_busy and not is_busy
        self._was_busy = is_busy
        now_s = time.monotonic()
        if now_s < self._next_s and not came_to_rest:
            return None
        self._next_s = now_s + REPORT_S
        gauges: dict[str, dict[str, float]] = {}
        counters: dict[str, dict[str, float]] = {}
        for stats in (self._scheduler.manager.get_stats(), self._scheduler.get_stats()):
            self._add(PRIMARY_TIER, stats, gauges, counters)
            for tier, tier_stats in stats.tiers.items():
                self._add(tier, tier_stats, gauges, counters)
        return VllmStats(data={"gauges": gauges, "counters": counters})

    def _add(
        self,
        tier: str,
        stats: Stats,
        gauges: dict[str, dict[str, float]],
        counters: dict[str, dict[str, float]],
    ) -> None:
        gauges.setdefault(tier, {}).update(stats.gauges)
        for name, total in stats.counters.items():
            increase = total - self._last.get((tier, name), 0)
            self._last[tier, name] = total
            counters.setdefault(tier, {})[name] = increase


class VllmPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Makes each metric when it is first reported: tiers of third parties have their own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **kwargs)
        self._made: dict[str, Any] = {}

    @override
    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        for tier, gauges in transfer_stats_data.get("gauges", {}).items():
            for name, value in gauges.items():
                self._metric(self._gauge_cls, Gauge, name, tier, engine_idx).set(value)
        for tier, counters in transfer_stats_data.get("counters", {}).items():
            for name, value in counters.items():
                self._metric(self._counter_cls, Counter, name, tier, engine_idx).inc(value)

    def _metric(self, make: Any, kind: type, name: str, tier: str, engine_idx: int) -> Any:  # noqa: ANN401
        labels = list(self._labelnames)
        values = list(self.per_engine_labelvalues[engine_idx])
        full_name = f"{PREFIX}{name}"
        if tier != PRIMARY_TIER:
            labels.append("tier")
            values.append(tier)
            full_name = f"{PREFIX}tier_{name}"
        if full_name not in self._made:
            text = HELP.get(name, name.replace("_", " "))
            multi = {"multiprocess_mode": "mostrecent"} if kind is Gauge else {}
            self._made[full_name] = make(full_name, text, labelnames=labels, **multi)
        return self._made[full_name].labels(*values)
