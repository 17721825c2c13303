"""How much of a request can be loaded: the longest prefix that every KV group can serve."""

from collections.abc import Iterable, Sequence

from kvstrata.connector.config import GroupKind, KVGroup, SchedulerOffloadConfig
from kvstrata.core.keys import OffloadKey
from kvstrata.core.manager import OffloadingManager
from kvstrata.core.request import ReqContext
from kvstrata.core.results import LookupResult


def first_needed_token(group: KVGroup, num_tokens: int) -> int:
    """Return the first token whose KV the group needs to compute token `num_tokens`."""
    if group.kind is GroupKind.WINDOW:
        assert group.window_tokens is not None
        return max(0, num_tokens - group.window_tokens + 1)
    return 0


def needed_range(group: KVGroup, start: int, end: int, unit: int) -> range:
    """Return which units of `unit` tokens the group needs, when tokens `start` to `end` are loaded.

    Args:
        group: The group; `unit` is its `tokens_per_block` or `tokens_per_chunk`.
        start: Tokens that the engine has already.
        end: Tokens that it has afterwards.
        unit: Tokens in a unit. The units returned overlap what is needed of `start` to `end`.
    """
    first = max(start, first_needed_token(group, end))
    return range(first // unit, -(-end // unit)) if first < end else range(0)


class PrefixMatcher:
    """Asks a manager about all groups of a request and combines the answers. Keeps no state."""

    def __init__(self, manager: OffloadingManager, config: SchedulerOffloadConfig) -> None:
        self._manager = manager
        self._config = config
        offloaded = [(i, g) for i, g in enumerate(config.groups) if g.is_offloaded]
        # Whole-prefix groups first: their answers bound what is asked, and fetched, of the others.
        self._groups = sorted(offloaded, key=lambda item: item[1].kind is not GroupKind.FULL)

    def find(
        self, keys: Sequence[Sequence[OffloadKey]], ctx: ReqContext, num_local: int, num_tokens: int
    ) -> int | None:
        """Return the end, in tokens, of what can be loaded now; `num_local` if nothing can.

        Args:
            keys: For each group, the keys of its full chunks, from the start of the request.
            ctx: The request.
            num_local: Tokens that the engine has.
            num_tokens: Tokens of the request; the answer is smaller.

        Returns:
            A multiple of the configured `tokens_per_match`, or `num_tokens - 1`; None: ask again.
        """
        per_match = self._config.tokens_per_match
        end = min(len(keys[i]) * group.tokens_per_chunk for i, group in self._groups)
        end = end // per_match * per_match
        if len(self._groups) > 1 or self._groups[0][1].kind is not GroupKind.FULL:
            end = self._possible_end(keys, ctx, num_local, end, num_tokens)
        while min(end, num_tokens - 1) > num_local:
            before, waits = end, False
            for i, group in self._groups:
                chunks = needed_range(
                    group, num_local, min(end, num_tokens - 1), group.tokens_per_chunk
                )
                found = self._manager.lookup(keys[i][chunks.start : chunks.stop], ctx)
                if found is None:
                    waits = True
                elif found < len(chunks):
                    end = (chunks.start + found) * group.tokens_per_chunk // per_match * per_match
            if end == before:
                return None if waits else min(end, num_tokens - 1)
        return num_local

    def _possible_end(
        self,
        keys: Sequence[Sequence[OffloadKey]],
        ctx: ReqContext,
        num_local: int,
        end: int,
        num_tokens: int,
    ) -> int:
        """Return the longest end for which no needed chunk is known to be missing.

        Nothing is fetched for it: what one group misses is not worth fetching for another, and a
        chunk outside the window that counts must not make the request wait.
        """
        per_match = self._config.tokens_per_match
        states = {i: self._manager.lookup_states(keys[i], ctx) for i, _ in self._groups}
        before = -1
        while end not in {before, 0}:
            before = end
            for i, group in self._groups:
                chunks = needed_range(
                    group, num_local, min(end, num_tokens - 1), group.tokens_per_chunk
                )
                missing = first_missing(states[i], chunks)
                if missing is not None:
                    end = missing * group.tokens_per_chunk // per_match * per_match
        return end

    def find_tail(
        self, tails: Iterable[tuple[int, Sequence[OffloadKey]]], ctx: ReqContext
    ) -> int | None:
        """Return the first end of which all keys can be loaded, 0 if there is none; None: later.

        Args:
            tails: Ends in tokens, longest first, each with the keys of all groups.
            ctx: The request.
        """
        for end, keys in tails:
            if LookupResult.MISS in self._manager.lookup_states(keys, ctx):
                continue
            found = self._manager.lookup(keys, ctx)
            if found is None:
                return None
            if found == len(keys):
                return end
        return 0


def first_missing(states: Sequence[LookupResult], chunks: range) -> int | None:
    """Return the first of the chunks that is a MISS."""
    return next((c for c in chunks if states[c] is LookupResult.MISS), None)
