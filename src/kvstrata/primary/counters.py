"""The primary's counters, and the snapshot of them that `get_stats()` returns."""

from dataclasses import dataclass, fields

from kvstrata.core.memory import SlotView, row_bytes_for
from kvstrata.core.stats import Stats
from kvstrata.primary.chunk_store import ChunkStore
from kvstrata.primary.request_state import RequestTable


@dataclass(slots=True)
class Counters:
    """Totals since start; `core/metrics.py` says what each means."""

    lookups: int = 0
    lookup_chunks: int = 0
    hit_chunks: int = 0
    offered_chunks: int = 0
    stored_chunks: int = 0
    present_chunks: int = 0
    no_room: int = 0
    failed_store_chunks: int = 0
    loaded_chunks: int = 0
    failed_load_chunks: int = 0
    deleted_chunks: int = 0
    late_completions: int = 0
    hint_errors: int = 0


def primary_stats(
    slots: SlotView,
    store: ChunkStore,
    num_protected: int,
    requests: RequestTable,
    counters: Counters,
) -> Stats:
    """Return one snapshot; every metric of `PRIMARY_METRICS` is in it."""
    chunk_bytes = slots.chunk_bytes
    here, dropped = store.table.all_runs()
    resident = [run for run in here if run.owner is None]
    num_resident = sum(len(run.keys) for run in resident)
    num_held = sum(len(run.keys) for run in resident if run.num_holds)
    gauges = {
        "num_slots": slots.num_slots,
        "num_resident": num_resident,
        "num_writing": sum(len(run.keys) for run in here + dropped if run.owner is not None),
        "num_free": len(store.table.free),
        "num_pinned": requests.num_loading(),
        "num_protected": num_protected,
        "num_evictable": num_resident - num_held,
        "num_requests": len(requests),
        "num_events": store.num_events,
        "requested_bytes": slots.num_slots * chunk_bytes,
        "reserved_bytes": slots.num_slots * row_bytes_for(chunk_bytes),
    }
    totals = {item.name: getattr(counters, item.name) for item in fields(counters)} | {
        "stored_bytes": counters.stored_chunks * chunk_bytes,
        "loaded_bytes": counters.loaded_chunks * chunk_bytes,
        "evicted_chunks": store.num_evicted,
        "expired_chunks": store.num_expired,
        "refused_chunks": store.num_refused,
        "dropped_events": store.num_events_dropped,
    }
    jobs = requests.copies(store.clock.now_s())
    return Stats(gauges=gauges, counters=totals, jobs=jobs)
