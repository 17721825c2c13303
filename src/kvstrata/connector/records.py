"""What is recorded of each request: where its tokens came from and how long it waited."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvstrata.core.events import PRIMARY_MEDIUM
from kvstrata.core.stats import Stats

NUM_RECORDS_MAX: Final = 4096


@dataclass(slots=True)
class RequestRecord:
    """Where the tokens of a request came from, and how long it waited for them.

    `queried_tokens` are those it had when it first got blocks; they are the sum of
    `engine_tokens` (the engine's own prefix cache), `tokens_by_medium` and `missed_tokens`.

    Attributes:
        req_id: The request.
        queried_tokens: Tokens at first admission.
        engine_tokens: Served by the engine itself.
        tokens_by_medium: Loaded, by the medium they were found in: "cpu" or a tier's name.
        missed_tokens: Computed, among them those whose load failed.
        resumed_tokens: Loaded after preemptions; beyond `queried_tokens`.
        num_preemptions: Times it lost its blocks.
        wait_s: Time between an answer "ask again" and the answer that ended it.
        load_s: From the start of loads to their outcome.
    """

    req_id: str
    queried_tokens: int = 0
    engine_tokens: int = 0
    tokens_by_medium: dict[str, int] = field(default_factory=dict)
    missed_tokens: int = 0
    resumed_tokens: int = 0
    num_preemptions: int = 0
    wait_s: float = 0.0
    load_s: float = 0.0

    def admit(self, num_tokens: int, num_engine_tokens: int) -> None:
        """Note the first admission; what the engine lacks counts as missed until it is loaded."""
        self.queried_tokens = num_tokens
        self.engine_tokens = num_engine_tokens
        self.missed_tokens = num_tokens - num_engine_tokens

    def add_loaded(self, tokens_by_medium: Mapping[str, int]) -> None:
        """Note what a load brought."""
        num_tokens = sum(tokens_by_medium.values())
        if self.num_preemptions:
            self.resumed_tokens += num_tokens
            return
        self.missed_tokens -= num_tokens
        for medium, num in tokens_by_medium.items():
            self.tokens_by_medium[medium] = self.tokens_by_medium.get(medium, 0) + num


class RecordBook:
    """Totals over all requests, and the records of those that ended, newest last, bounded."""

    def __init__(self) -> None:
        self._ended: deque[RequestRecord] = deque(maxlen=NUM_RECORDS_MAX)
        self._counters = dict.fromkeys(
            ("finished_requests", "queried_tokens", "engine_tokens", "primary_tokens",
             "tier_tokens", "missed_tokens", "resumed_tokens", "preemptions"), 0
        )  # fmt: skip
        self._tier_tokens: dict[str, int] = {}
        self._wait_s = 0.0
        self._load_s = 0.0

    def end(self, record: RequestRecord) -> None:
        """Add a request that will not change any more: its totals are counted now."""
        self._ended.append(record)
        counters = self._counters
        counters["finished_requests"] += 1
        counters["queried_tokens"] += record.queried_tokens
        counters["engine_tokens"] += record.engine_tokens
        counters["missed_tokens"] += record.missed_tokens
        counters["resumed_tokens"] += record.resumed_tokens
        counters["preemptions"] += record.num_preemptions
        for medium, num_tokens in record.tokens_by_medium.items():
            if medium == PRIMARY_MEDIUM:
                counters["primary_tokens"] += num_tokens
            else:
                counters["tier_tokens"] += num_tokens
                self._tier_tokens[medium] = self._tier_tokens.get(medium, 0) + num_tokens
        self._wait_s += record.wait_s
        self._load_s += record.load_s

    def take(self) -> list[RequestRecord]:
        """Return the records of requests that ended since the last call, oldest first.

        Only the newest few thousand are kept between calls.
        """
        records = list(self._ended)
        self._ended.clear()
        return records

    def stats(self, gauges: Mapping[str, float], counters: Mapping[str, float]) -> Stats:
        """Return the totals together with what the scheduler adds."""
        times = {"lookup_wait_s": self._wait_s, "load_s": self._load_s}
        tiers = {
            name: Stats(counters={"served_tokens": num}) for name, num in self._tier_tokens.items()
        }
        return Stats(dict(gauges), {**self._counters, **times, **counters}, tiers)
