"""Find out, for the chunks behind a primary hit, where they are and whether to wait for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstrata.core.keys import OffloadKey
from kvstrata.core.results import LookupResult
from kvstrata.primary.chunk_store import ChunkStore
from kvstrata.tiering.promotion import Promotions
from kvstrata.tiering.request_view import RequestView
from kvstrata.tiering.tier_handle import TierHandle


@dataclass(slots=True)
class Survey:
    """The usable stretch of keys behind the ones that are loadable now.

    Attributes:
        found: Chunks to fetch.
        handles: The tier of each of them.
        num_pending: Chunks that are on their way up already.
        num_unknown: Chunks that a tier is still looking for.
    """

    found: list[OffloadKey] = field(default_factory=list)
    handles: list[TierHandle] = field(default_factory=list)
    num_pending: int = 0
    num_unknown: int = 0

    @property
    def num_missing(self) -> int:
        """Chunks of the stretch that are not loadable yet."""
        return len(self.found) + self.num_pending + self.num_unknown


def ask_tiers(
    keys: Sequence[OffloadKey], handles: Sequence[TierHandle], view: RequestView
) -> dict[OffloadKey, TierHandle | None]:
    """Ask the request's tiers in order for chunks.

    Returns the tier that has each chunk, None for those that some tier is still looking for; what
    no tier has is left out.
    """
    answers: dict[OffloadKey, TierHandle | None] = {}
    for handle in handles:
        if not view.load_mask & handle.bit or not handle.is_usable():
            continue
        open_keys = [key for key in keys if answers.get(key) is None]
        if not open_keys:
            break
        for key, answer in zip(open_keys, handle.lookup(open_keys, view.ctx), strict=True):
            if answer is LookupResult.HIT:
                answers[key] = handle
            elif answer is not LookupResult.MISS:
                answers.setdefault(key, None)
    return answers


def survey(
    keys: Sequence[OffloadKey],
    store: ChunkStore,
    promotions: Promotions,
    handles: Sequence[TierHandle],
    view: RequestView,
) -> Survey:
    """Look at keys from the first on, as far as every one is here, coming, or in a tier.

    The stretch ends at a chunk that nobody has, that failed to load for this request before, or
    that another request is still storing.
    """
    absent, stretch, pending = _split(keys, store, promotions, view)
    answers = ask_tiers(absent, handles, view) if absent else {}
    result = Survey()
    for key in stretch:
        if key in pending:
            result.num_pending += 1
        elif key in answers:
            handle = answers[key]
            if handle is None:
                result.num_unknown += 1
            else:
                result.found.append(key)
                result.handles.append(handle)
        elif key not in store.table:
            break
    return result


def _split(
    keys: Sequence[OffloadKey], store: ChunkStore, promotions: Promotions, view: RequestView
) -> tuple[list[OffloadKey], list[OffloadKey], set[OffloadKey]]:
    """Return absent keys, the stretch before one that rules itself out, and what is coming up."""
    absent: list[OffloadKey] = []
    stretch: list[OffloadKey] = []
    pending: set[OffloadKey] = set()
    for key in keys:
        if key not in store.table:
            if key in view.failed:
                break
            absent.append(key)
        elif not store.is_resident(key):
            if not promotions.is_promoting(key):
                break
            pending.add(key)
        stretch.append(key)
    return absent, stretch, pending
