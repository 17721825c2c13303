"""Find out, for the chunks behind a primary hit, where they are and whether to wait for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstrata.core.keys import OffloadKey
from kvstrata.core.results import LookupResult
from kvstrata.primary.chunk_store import ChunkStore
from kvstrata.tiering.promotion import Promotions
from kvstrata.tiering.request_view import RequestView
from kvstrata.tiering.stretches import in_common
from kvstrata.tiering.tier_handle import TierHandle

HIT, MISS = LookupResult.HIT, LookupResult.MISS
NUM_ASKED_MAX: Final = 1024
"""Chunks that tiers are asked for in one lookup: it takes time for each of them."""


@dataclass(slots=True)
class Survey:
    """The usable stretch of keys behind the ones that are loadable now.

    Attributes:
        found: Chunks to fetch, in order, as stretches from one tier each.
        num_pending: Chunks that are on their way up already.
        num_unknown: Chunks that a tier is still looking for, and those behind one: they must not
            take the last slots, which it will need.
        is_cut: There may be more behind them that no tier was asked for.
    """

    found: list[tuple[TierHandle, list[OffloadKey]]] = field(default_factory=list)
    num_pending: int = 0
    num_unknown: int = 0
    is_cut: bool = False

    @property
    def num_missing(self) -> int:
        """Chunks of the stretch that are not loadable yet."""
        return sum(len(keys) for _, keys in self.found) + self.num_pending + self.num_unknown

    def num_from(self) -> dict[TierHandle, int]:
        """Return how many chunks each tier would be asked for."""
        counts: dict[TierHandle, int] = {}
        for handle, keys in self.found:
            counts[handle] = counts.get(handle, 0) + len(keys)
        return counts

    def add(self, handle: TierHandle, key: OffloadKey) -> None:
        """Add the next chunk to fetch."""
        if not self.found or self.found[-1][0] is not handle:
            self.found.append((handle, []))
        self.found[-1][1].append(key)


def ask_tiers(keys: Sequence[OffloadKey], view: RequestView) -> dict[OffloadKey, TierHandle | None]:
    """Ask the request's tiers in order for distinct chunks.

    Returns the tier that has each chunk, None for those that some tier is still looking for; what
    no tier has is left out.
    """
    answers: dict[OffloadKey, TierHandle | None] = {}
    for handle in view.loads:
        if not handle.can_load():
            continue
        open_keys = [key for key in keys if answers.get(key) is None] if answers else keys
        if not open_keys:
            break
        results = handle.lookup(open_keys, view.ctx)
        if not answers and results.count(HIT) == len(keys):
            return dict.fromkeys(keys, handle)
        if results.count(MISS) == len(results):
            continue
        for key, answer in zip(open_keys, results, strict=True):
            if answer is HIT:
                answers[key] = handle
            elif answer is not MISS:
                answers.setdefault(key, None)
    return answers


def survey(
    keys: Sequence[OffloadKey], store: ChunkStore, promotions: Promotions, view: RequestView
) -> Survey:
    """Look at keys from the first on, as far as every one is here, coming, or in a tier.

    The stretch ends at a chunk that nobody has, that failed to load for this request before, or
    that another request is still storing; or behind `NUM_ASKED_MAX` chunks that tiers were asked
    for: a later lookup goes on from there.
    """
    result = Survey()
    keys, at = list(dict.fromkeys(keys)), 0
    while at < len(keys):
        run = store.table.find(keys[at])
        if run is None:
            absent = _leading_absent(keys[at : at + NUM_ASKED_MAX], store)
            num_usable = _add_absent(absent, result, view)
            at += num_usable
            result.is_cut = num_usable == NUM_ASKED_MAX
            if num_usable < len(absent) or result.is_cut:
                break
            continue
        source = promotions.source_of(run)
        if source is None and run.owner is not None:
            break
        common = in_common(run, keys[at : at + len(run.keys)])
        if source is not None:
            result.num_pending += len(common)
            view.fetched.update(dict.fromkeys(common, source.name))
        at += len(common)
    return result


def _leading_absent(keys: list[OffloadKey], store: ChunkStore) -> list[OffloadKey]:
    """Return the first keys, as far as the primary has none of them."""
    absent = store.table.absent(keys)
    if len(absent) == len(keys):
        return keys
    return keys[: next(i for i, key in enumerate(keys) if absent[i : i + 1] != [key])]


def _add_absent(absent: list[OffloadKey], result: Survey, view: RequestView) -> int:
    """Ask tiers for chunks that the primary lacks; return how many of the first are usable."""
    if not view.failed.isdisjoint(absent):
        absent = absent[: next(i for i, key in enumerate(absent) if key in view.failed)]
    answers = ask_tiers(absent, view) if absent else {}
    if not answers:
        return 0
    first = answers.get(absent[0])
    if (
        first is not None
        and not result.num_unknown
        and list(answers.values()).count(first) == len(absent)
    ):
        result.found.append((first, absent))
        return len(absent)
    for i, key in enumerate(absent):
        if key not in answers:
            return i
        handle = answers[key]
        if handle is None or result.num_unknown:
            result.num_unknown += 1
        else:
            result.add(handle, key)
    return len(absent)
