"""What a replay through tiers counts while it runs, in bounded memory."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from kvstrata.core.events import PRIMARY_MEDIUM, EventKind, OffloadingEvent, RemovalReason
from kvstrata.core.keys import OffloadKey

_NUM_BUCKETS_MAX: Final = 120
_LEFT: Final = (RemovalReason.EVICTED, RemovalReason.DEMOTED)


class Ages:
    """How long chunks had been unused when they were evicted, per medium, by powers of two."""

    def __init__(self) -> None:
        """Start without chunks."""
        self._used_s: dict[str, dict[OffloadKey, float]] = {}  # of resident chunks
        self._counts: dict[str, Counter[int]] = {}

    def use(self, keys: Iterable[OffloadKey], at_s: float) -> None:
        """Note a use of chunks, wherever they are."""
        for used_s in self._used_s.values():
            for key in keys:
                if key in used_s:
                    used_s[key] = at_s

    def note(self, event: OffloadingEvent, at_s: float) -> None:
        """Follow chunks in and out."""
        used_s = self._used_s.setdefault(event.medium, {})
        if event.kind is EventKind.STORED:
            used_s.update(dict.fromkeys(event.keys, at_s))
        elif event.kind is EventKind.REMOVED:
            ages = [at_s - used_s.pop(key) for key in event.keys if key in used_s]
            if event.reason in _LEFT:
                counts = self._counts.setdefault(event.medium, Counter())
                counts.update(int(age_s).bit_length() for age_s in ages)

    def as_json(self, medium: str) -> dict[str, int]:
        """Return evicted chunks by age: "<8s" counts those of 4 to 8 s."""
        counts = self._counts.get(medium, Counter())
        return {f"<{1 << power}s": counts[power] for power in sorted(counts)}


class Timeline:
    """Sums over stretches of trace time, made longer whenever there are too many."""

    def __init__(self) -> None:
        """Start with stretches of a second."""
        self.width_s = 1.0
        self._buckets: dict[int, Counter[str]] = {}

    def add(self, at_s: float, amounts: Counter[str]) -> None:
        """Add amounts by name at a time."""
        self._buckets.setdefault(int(at_s // self.width_s), Counter()).update(amounts)
        while len(self._buckets) > _NUM_BUCKETS_MAX:
            self.width_s *= 2
            merged: dict[int, Counter[str]] = {}
            for number, sums in self._buckets.items():
                merged.setdefault(number // 2, Counter()).update(sums)
            self._buckets = merged

    def as_json(self) -> list[dict[str, float]]:
        """Return the stretches in order, each with the time at which it begins."""
        return [
            {"at_s": number * self.width_s, **self._buckets[number]}
            for number in sorted(self._buckets)
        ]


class Served(NamedTuple):
    """A request that was served: `media[i]` says where its i-th chunk was hit, as far as it was."""

    at_s: float
    num_tokens: int
    keys: Sequence[OffloadKey]
    media: Sequence[str]
    num_stored: int
    wait_s: float


class TierTally:
    """Adds up what requests hit where, what they stored, and how long they waited."""

    def __init__(self, tokens_per_chunk: int) -> None:
        """Start at nothing."""
        self.tokens_per_chunk = tokens_per_chunk
        self.num_requests = self.num_blocks = self.num_hits = self.num_writes = 0
        self.num_tokens = self.num_hit_tokens = 0
        self.wait_s = self.wait_max_s = 0.0
        self.num_waits = 0
        self.first_s: float | None = None
        self.last_s = 0.0
        self.hits: Counter[str] = Counter()
        self.hit_tokens: Counter[str] = Counter()
        self.ages = Ages()
        self.timeline = Timeline()

    def add(self, served: Served) -> None:
        """Count a request."""
        at_s, num_tokens, keys, media, num_stored, wait_s = served
        if self.first_s is None:
            self.first_s = at_s
        self.last_s = max(self.last_s, at_s)
        num_hits, span = len(media), self.tokens_per_chunk
        num_hit_tokens = min(num_hits * span, num_tokens)
        self.num_requests += 1
        self.num_blocks += len(keys)
        self.num_tokens += num_tokens
        self.num_hits += num_hits
        self.num_hit_tokens += num_hit_tokens
        self.num_writes += num_stored
        self.wait_s += wait_s
        self.wait_max_s = max(self.wait_max_s, wait_s)
        self.num_waits += wait_s > 0
        by_medium = Counter(media)
        self.hits.update(by_medium)
        for medium, num in by_medium.items():
            self.hit_tokens[medium] += num * span
        if media:
            self.hit_tokens[media[-1]] -= num_hits * span - num_hit_tokens  # the last is not full
        self.ages.use(keys[:num_hits], at_s)
        amounts = Counter({f"hits.{medium}": num for medium, num in by_medium.items()})
        amounts.update({"requests": 1, "blocks": len(keys), "stored": num_stored})
        self.timeline.add(at_s, amounts)

    def medium_json(self, medium: str = PRIMARY_MEDIUM) -> dict[str, Any]:
        """Return what was hit in one medium and how old evicted chunks were."""
        return {
            "hits": self.hits[medium],
            "hit_tokens": self.hit_tokens[medium],
            "eviction_ages": self.ages.as_json(medium),
        }
