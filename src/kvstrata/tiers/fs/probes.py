"""Keys that nobody here knows: asked for in one batch a step, answered from memory afterwards."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

from kvstrata.core.keys import OffloadKey
from kvstrata.core.results import LookupResult
from kvstrata.tiers.fs.workers import Lane, Workers

NUM_ASKED_MAX: Final = 65536
_BATCH: Final = 256


class _Probe:
    """One part of a batch of keys to look for."""

    def __init__(self, probes: "Probes", keys: Sequence[OffloadKey]) -> None:
        self._probes = probes
        self._keys = keys

    def run(self, page: memoryview) -> None:
        del page
        self._probes.answer(self._keys)

    def fail(self) -> None:
        self._probes.forget(self._keys)


class Probes:
    """Remembers that a key is absent until the end of the step after it was found out.

    "Not known" is never remembered as "absent". Thread: the manager's, except `answer` and
    `forget`.
    """

    def __init__(
        self, workers: Workers, find: Callable[[Sequence[OffloadKey]], Collection[OffloadKey]]
    ) -> None:
        """Take the threads, and what makes found keys resident and returns the absent ones."""
        self._workers = workers
        self._find = find
        self._asked: dict[OffloadKey, None] = {}
        self._probing: set[OffloadKey] = set()
        self._absent: set[OffloadKey] = set()
        self._absent_before: set[OffloadKey] = set()

    def lookup(self, key: OffloadKey) -> LookupResult:
        """Say MISS if the key was just found absent; else RETRY, and ask."""
        if key in self._absent or key in self._absent_before:
            return LookupResult.MISS
        if key not in self._probing and key not in self._asked:
            if len(self._asked) >= NUM_ASKED_MAX:
                return LookupResult.MISS
            self._asked[key] = None
        return LookupResult.RETRY

    def start(self) -> None:
        """End the step: send off what was asked, forget old answers."""
        self._absent_before, self._absent = self._absent, set()
        if not self._asked:
            return
        keys, self._asked = list(self._asked), {}
        self._probing.update(keys)
        self._workers.submit(Lane.CHORE, self._split(keys), len(keys) // _BATCH + 1)

    def answer(self, keys: Sequence[OffloadKey]) -> None:
        """Look for keys. Thread: a worker."""
        try:
            self._absent.update(self._find(keys))
        finally:
            self.forget(keys)

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        """Note that keys are not being looked for any more. Thread: a worker."""
        self._probing.difference_update(keys)

    def _split(self, keys: Sequence[OffloadKey]) -> Iterator[_Probe]:
        for start in range(0, len(keys), _BATCH):
            yield _Probe(self, keys[start : start + _BATCH])
