"""Look at many keys at once, run by run: what a request names in order mostly lies so in runs."""

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
