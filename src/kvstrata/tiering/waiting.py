"""Whether a request waits for slower tiers, and for how long."""

from dataclasses import dataclass, replace

from kvstrata.tiering.request_view import RequestView
from kvstrata.tiering.survey import Survey


@dataclass(frozen=True, slots=True)
class TieringLimits:
    """When a request waits for slower tiers.

    Attributes:
        max_wait_s: Longest wait of one request, unless it asks for less.
        hold_s: How long fetched chunks are kept for a request that does not come for them.
        num_wait_chunks_min: A request does not wait for fewer chunks than this.
        tokens_per_chunk: For hints and rates that count tokens.
        prefill_tokens_per_s: How fast the engine computes; None if not known.
    """

    max_wait_s: float = 5.0
    hold_s: float = 10.0
    num_wait_chunks_min: int = 0
    tokens_per_chunk: int = 1
    prefill_tokens_per_s: float | None = None


class Patience:
    """Weighs loading against computing, within one deadline per request."""

    def __init__(self, limits: TieringLimits) -> None:
        self.limits = limits

    def set_prefill_rate(self, tokens_per_s: float) -> None:
        """Learn how fast the engine computes."""
        self.limits = replace(self.limits, prefill_tokens_per_s=tokens_per_s)

    def is_worth_waiting(self, found: Survey) -> bool:
        """Say whether fetching is expected to be sooner than computing."""
        limits, num_missing = self.limits, found.num_missing
        if not num_missing:
            return False
        if num_missing < limits.num_wait_chunks_min and not found.is_cut:
            return False
        rate = limits.prefill_tokens_per_s
        if not rate or not found.found:
            return True
        compute_s = num_missing * limits.tokens_per_chunk / rate
        times = [handle.expected_load_s(count) for handle, count in found.num_from().items()]
        return all(load_s is None or load_s <= compute_s for load_s in times)

    def wait(self, view: RequestView, now_s: float) -> None:
        """Let a request wait; the first time sets its deadline."""
        if view.deadline_s is None:
            wished_s = view.ctx.hints.max_wait_s
            wait_s = self.limits.max_wait_s if wished_s is None else wished_s
            view.deadline_s = now_s + min(wait_s, self.limits.max_wait_s)
        view.note_waits(now_s)
