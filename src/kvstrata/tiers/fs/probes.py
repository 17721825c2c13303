"""Keys that nobody here knows: asked for in one batch a step, answered from memory afterwards."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

from typing_extensions import override

from kvstrata.core.clock import Clock
from kvstrata.core.keys import OffloadKey
from kvstrata.core.request import ReqContext
from kvstrata.core.results import LookupResult
from kvstrata.tiers.fs.workers import Lane, Workers

NUM_ASKED_MAX: Final = 65536
ASK_AGAIN_S: Final = 1.0
_BATCH: Final = 256


class _Probe:
    """One part of a batch of keys to look for."""

    def __init__(self, probes: "Probes", keys: Sequence[OffloadKey]) -> None:
        self._probes = probes
        self._keys = keys

    @override
    def __str__(self) -> str:
        return f"looking for {len(self._keys)} chunks from {self._keys[0].hex()} on"

    def run(self, page: memoryview) -> None:
        del page
        self._probes.answer(self._keys)

    def fail(self) -> None:
        self._probes.forget(self._keys)


class Probes:
    """Remembers absent keys until the end of the next step, and what each request was told.

    A live request that was told MISS is told so again, while the key is looked for now and then; a
    new request gets a new answer. "Not known" is never taken for "absent". Thread: the manager's,
    except `answer` and `forget`.
    """

    def __init__(
        self,
        workers: Workers,
        find: Callable[[Sequence[OffloadKey]], Collection[OffloadKey]],
        clock: Clock,
    ) -> None:
        """Take the threads, and what makes found keys resident and returns the absent ones."""
        self._workers = workers
        self._find = find
        self._clock = clock
        self._asked: dict[OffloadKey, None] = {}
        self._probing: set[OffloadKey] = set()
        # Keys found absent in this step and in the one before, and which other requests know.
        self._absent: dict[OffloadKey, set[str]] = {}
        self._absent_before: dict[OffloadKey, set[str]] = {}
        self._told: dict[str, dict[OffloadKey, float]] = {}  # when, by live request

    def start_request(self, ctx: ReqContext) -> None:
        """Begin to remember what a request was told."""
        self._told[ctx.req_id] = {}

    def end_request(self, ctx: ReqContext) -> None:
        """Forget what a request was told."""
        self._told.pop(ctx.req_id, None)

    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        """Say MISS if the key is known to be absent; else RETRY, and ask."""
        told = self._told.get(ctx.req_id)
        if told is not None and key in told:
            now_s = self._clock.now_s()
            if now_s - told[key] >= ASK_AGAIN_S and self._ask(key):
                told[key] = now_s
            return LookupResult.MISS
        known_to = self._absent.get(key, self._absent_before.get(key))
        if known_to is not None and ctx.req_id not in known_to:
            if told is not None:
                told[key] = self._clock.now_s()
            else:
                known_to.add(ctx.req_id)  # asks again only to learn what is new
            return LookupResult.MISS
        return LookupResult.RETRY if self._ask(key) else LookupResult.MISS

    def _ask(self, key: OffloadKey) -> bool:
        """Have the key looked for; False if too many are already."""
        if key not in self._probing and key not in self._asked:
            if len(self._asked) >= NUM_ASKED_MAX:
                return False
            self._asked[key] = None
        return True

    def start(self) -> None:
        """End the step: send off what was asked, forget old answers."""
        self._absent_before, self._absent = self._absent, {}
        if not self._asked:
            return
        keys, self._asked = list(self._asked), {}
        self._probing.update(keys)
        self._workers.submit(Lane.CHORE, self._split(keys), len(keys) // _BATCH + 1)

    def answer(self, keys: Sequence[OffloadKey]) -> None:
        """Look for keys. Thread: a worker."""
        try:
            for key in self._find(keys):
                self._absent[key] = set()
        finally:
            self.forget(keys)

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        """Note that keys are not being looked for any more. Thread: a worker."""
        self._probing.difference_update(keys)

    def _split(self, keys: Sequence[OffloadKey]) -> Iterator[_Probe]:
        for start in range(0, len(keys), _BATCH):
            yield _Probe(self, keys[start : start + _BATCH])
