"""Find out, for the chunks behind a primary hit, where they are and whether to wait for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstrata.core.keys import OffloadKey
from kvstrata.core.results import LookupResult
from kvstrata.primary.chunk_store import ChunkStore
from kvstrata.tiering.promotion import Promotions
from kvstrata.tiering.request_view import RequestView
from kvstrata.tiering.tier_handle import TierHandle

HIT, MISS = LookupResult.HIT, LookupResult.MISS
NOBODY = object()


@dataclass(slots=True)
class Survey:
    """The usable stretch of keys behind the ones that are loadable now.

    Attributes:
        found: Chunks to fetch, in order, as stretches from one tier each.
        num_pending: Chunks that are on their way up already.
        num_unknown: Chunks that a tier is still looking for.
    """

    found: list[tuple[TierHandle, list[OffloadKey]]] = field(default_factory=list)
    num_pending: int = 0
    num_unknown: int = 0

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
    that another request is still storing.
    """
    absent = store.table.absent(keys)
    stretch = absent
    if len(absent) < len(keys) or not view.failed.isdisjoint(absent):
        stretch = _stretch(keys, store, promotions, view)
        absent = store.table.absent(stretch)
    answers = ask_tiers(absent, view) if absent else {}
    result = Survey()
    first = answers.get(stretch[0]) if stretch else None
    if first is not None and list(answers.values()).count(first) == len(stretch):
        result.found = [(first, stretch)]
        return result
    for key in stretch:
        handle = answers.get(key, NOBODY)
        if isinstance(handle, TierHandle):
            result.add(handle, key)
        elif handle is None:
            result.num_unknown += 1
        elif (source := promotions.source_of(key)) is not None:
            result.num_pending += 1
            view.fetched[key] = source.name
        elif not store.is_resident(key):
            break
    return result


def _stretch(
    keys: Sequence[OffloadKey], store: ChunkStore, promotions: Promotions, view: RequestView
) -> list[OffloadKey]:
    """Return the distinct keys before the first one that rules itself out."""
    stretch: list[OffloadKey] = []
    for key in dict.fromkeys(keys):
        run = store.table.find(key)
        if run is None:
            if key in view.failed:
                break
        elif run.owner is not None and promotions.source_of(key) is None:
            break
        stretch.append(key)
    return stretch
