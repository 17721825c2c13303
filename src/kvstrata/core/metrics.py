"""One table of every metric: name, kind, unit, labels and what it means."""

from typing import Final, NamedTuple


class Metric(NamedTuple):
    """A row of the table; `kind` is "gauge" or "counter"."""

    name: str
    kind: str
    unit: str
    help: str
    labels: tuple[str, ...] = ()


PRIMARY_METRICS: Final = (
    Metric("num_slots", "gauge", "chunks", "places in the primary"),
    Metric("num_resident", "gauge", "chunks", "places whose chunk can be loaded"),
    Metric("num_writing", "gauge", "chunks", "places reserved for a copy in flight"),
    Metric("num_free", "gauge", "chunks", "places that hold nothing"),
    Metric("num_pinned", "gauge", "chunks", "resident places that a copy in flight reads"),
    Metric("num_protected", "gauge", "chunks", "chunks kept for preempted requests"),
    Metric("num_evictable", "gauge", "chunks", "resident places that could be freed now"),
    Metric("num_requests", "gauge", "requests", "requests with state in the manager"),
    Metric("num_events", "gauge", "events", "events waiting for take_events()"),
    Metric("requested_bytes", "gauge", "bytes", "payload bytes that the settings ask for"),
    Metric("reserved_bytes", "gauge", "bytes", "address space of the region, rows aligned"),
    Metric("lookups", "counter", "calls", "lookup calls"),
    Metric("lookup_chunks", "counter", "chunks", "keys asked for, the denominator of hits"),
    Metric("hit_chunks", "counter", "chunks", "keys answered as loadable prefix"),
    Metric("offered_chunks", "counter", "chunks", "keys offered for storing"),
    Metric("stored_chunks", "counter", "chunks", "chunks whose store completed"),
    Metric("stored_bytes", "counter", "bytes", "payload of those"),
    Metric("present_chunks", "counter", "chunks", "offered chunks that were there already"),
    Metric("refused_chunks", "counter", "chunks", "offered chunks that the policy refused"),
    Metric("no_room", "counter", "calls", "stores answered with no room"),
    Metric("failed_store_chunks", "counter", "chunks", "chunks whose store failed"),
    Metric("loaded_chunks", "counter", "chunks", "chunks loaded by the engine"),
    Metric("loaded_bytes", "counter", "bytes", "payload of those"),
    Metric("failed_load_chunks", "counter", "chunks", "chunks whose load failed"),
    Metric("evicted_chunks", "counter", "chunks", "chunks that left to make room"),
    Metric("expired_chunks", "counter", "chunks", "chunks whose ttl_s ended"),
    Metric("deleted_chunks", "counter", "chunks", "chunks removed by delete"),
    Metric("late_completions", "counter", "calls", "completions for requests not known any more"),
    Metric("hint_errors", "counter", "hints", "hints that were unknown or bad"),
    Metric("dropped_events", "counter", "events", "events dropped because nobody took them"),
)

# What every secondary tier's `get_stats()` holds; a tier may add to it.
TIER_METRICS: Final = (
    Metric("num_resident", "gauge", "chunks", "chunks that the tier knows it holds"),
    Metric("used_bytes", "gauge", "bytes", "bytes that they take"),
    Metric("num_jobs", "gauge", "jobs", "copies in flight"),
    Metric("stored_chunks", "counter", "chunks", "chunks written"),
    Metric("stored_bytes", "counter", "bytes", "payload of those"),
    Metric("present_chunks", "counter", "chunks", "chunks not written, being there already"),
    Metric("failed_store_chunks", "counter", "chunks", "chunks whose store failed"),
    Metric("loaded_chunks", "counter", "chunks", "chunks read and verified"),
    Metric("loaded_bytes", "counter", "bytes", "payload of those"),
    Metric("failed_load_chunks", "counter", "chunks", "chunks whose load failed"),
)

# On top of TIER_METRICS.
P2P_METRICS: Final = (
    Metric("num_peers", "gauge", "peers", "hosts to pull from"),
    Metric("num_peers_up", "gauge", "peers", "those that are not taken for dead"),
    Metric("num_connections", "gauge", "connections", "accepted from peers and open"),
    Metric("num_answers", "gauge", "chunks", "keys whose holders are known or asked for"),
    Metric("num_answers_max", "gauge", "chunks", "limit of that"),
    Metric("num_published", "gauge", "chunks", "chunks of this host that peers can pull"),
    Metric("num_leased", "gauge", "chunks", "those that a peer reads now"),
    Metric("num_parked", "gauge", "chunks", "those kept for a host that will fetch them"),
    Metric("num_parked_max", "gauge", "chunks", "limit of that"),
    Metric(
        "lookup_requests", "counter", "requests", "questions sent to peers, each one round trip"
    ),
    Metric("corrupt_chunks", "counter", "chunks", "copies whose checksum was wrong"),
    Metric("refused_store_chunks", "counter", "chunks", "stores: hosts pull, none is pushed to"),
    Metric("lost_peers", "counter", "times", "a peer was taken for dead"),
    Metric("accepted_connections", "counter", "connections", "peers that proved who they are"),
    Metric("refused_connections", "counter", "connections", "too many were not proved yet"),
    Metric("failed_accepts", "counter", "times", "the system could not accept"),
    Metric("protocol_errors", "counter", "connections", "closed for what was said on them"),
    Metric("internal_errors", "counter", "connections", "closed for a fault of our own"),
    Metric("lookup_requests_served", "counter", "requests", "questions of peers answered"),
    Metric("served_chunks", "counter", "chunks", "chunks sent to peers"),
    Metric("served_bytes", "counter", "bytes", "payload of those"),
    Metric("reused_chunks", "counter", "chunks", "left their slot while they were sent: void"),
    Metric("requests_over_limit", "counter", "requests", "refused for a peer's rate of requests"),
    Metric("chunks_over_limit", "counter", "chunks", "refused for a peer's leases or bytes"),
)

# What the object tier adds.
OBJECT_METRICS: Final = (
    Metric("num_queued_stores", "gauge", "chunks", "chunks to be written, or being written"),
    Metric("num_queued_stores_max", "gauge", "chunks", "how many of them there may be"),
    Metric("num_queued_loads", "gauge", "chunks", "chunks to be read, or being read"),
    Metric("num_lookups", "gauge", "chunks", "keys whose presence is being found out"),
    Metric("num_lookups_max", "gauge", "chunks", "how many of them there may be"),
    Metric("num_requests", "gauge", "requests", "requests to the store that run now"),
    Metric("num_requests_max", "gauge", "requests", "how many of them there may be"),
    Metric("retries", "counter", "requests", "requests made again after a failure that may pass"),
    Metric("throttled", "counter", "requests", "requests that the store refused for now"),
    Metric("timeouts", "counter", "requests", "requests that took longer than they may"),
    Metric("unavailable", "counter", "requests", "requests that met no store, or a broken one"),
    Metric("denied", "counter", "requests", "requests that the credentials do not allow"),
    Metric("other_failures", "counter", "requests", "requests that failed otherwise"),
    Metric("expired_loads", "counter", "chunks", "loads given up at their deadline"),
    Metric("expired_stores", "counter", "chunks", "stores given up at their deadline"),
    Metric("dropped_stores", "counter", "chunks", "stores refused: queue full, no room, read-only"),
    Metric("hedged_loads", "counter", "requests", "reads made a second time because one was slow"),
    Metric("hedges_won", "counter", "requests", "those of them that were the sooner"),
    Metric("probes", "counter", "requests", "reads of an object's start, to answer lookups"),
    Metric("probe_hits", "counter", "requests", "probes that found the chunk"),
    Metric("probe_misses", "counter", "requests", "probes that found no chunk, or none to be used"),
    Metric("probe_unknown", "counter", "requests", "probes that found out nothing"),
    Metric("lookup_timeouts", "counter", "chunks", "keys called a miss because a probe took long"),
    Metric("dropped_lookups", "counter", "chunks", "keys called a miss because too many waited"),
    Metric("evicted_chunks", "counter", "chunks", "objects removed to make room"),
    Metric(
        "expired_chunks",
        "counter",
        "chunks",
        "objects removed at the end of their ttl_s, or of idle_s",
    ),
    Metric("deleted_chunks", "counter", "chunks", "objects removed by delete"),
    Metric("external_chunks", "counter", "chunks", "objects that somebody else removed"),
    Metric("corrupt_objects", "counter", "chunks", "objects removed because they were damaged"),
    Metric("failed_deletes", "counter", "chunks", "objects that could not be removed"),
)
