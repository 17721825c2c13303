"""Look at many keys at once, run by run: what a request names in order mostly lies so in runs."""

from collections.abc import Collection, Sequence
from itertools import takewhile

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import Run
from kvstrata.primary.run_table import RunTable


def in_common(run: Run, keys: list[OffloadKey]) -> list[OffloadKey]:
    """Return the first keys, as far as they are a stretch of the run."""
    start = run.keys.index(keys[0])
    stretch = run.keys[start : start + len(keys)]
    if keys[: len(stretch)] == stretch:
        return stretch
    return [
        key
        for key, _ in takewhile(lambda pair: pair[0] == pair[1], zip(keys, stretch, strict=False))
    ]


def resident_among(keys: list[OffloadKey], table: RunTable) -> list[OffloadKey]:
    """Return those of distinct keys that can be loaded, in order."""
    ready: list[OffloadKey] = []
    at = 0
    while at < len(keys):
        run = table.find(keys[at])
        common = [keys[at]] if run is None else in_common(run, keys[at : at + len(run.keys)])
        if run is not None and run.owner is None:
            ready += common
        at += len(common)
    return ready


def there_among(
    keys: Sequence[OffloadKey], table: RunTable, new: Collection[OffloadKey]
) -> list[OffloadKey]:
    """Return the distinct ones of keys that have a slot, resident or being written, in order.

    Args:
        keys: Any, also some more than once.
        table: Where to look.
        new: Keys that got their slots last, to be left out.
    """
    keys, left_out = list(keys), set(new)
    there: list[OffloadKey] = []
    at = 0
    is_end_tried = False
    while at < len(keys):
        run = table.find(keys[at])
        if run is None:
            if not is_end_tried and len(table.absent(keys[at:])) == len(keys) - at:
                break  # what is not there is mostly the end
            is_end_tried = True
            at += 1
            continue
        common = in_common(run, keys[at : at + len(run.keys)])
        if common[0] not in left_out:  # else all of them: what comes at one time is one run
            there += common
        at += len(common)
    return there if len(set(there)) == len(there) else list(dict.fromkeys(there))
