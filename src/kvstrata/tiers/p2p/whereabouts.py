"""Who holds which chunk, as far as peers said so lately."""

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvstrata.core.clock import Clock
from kvstrata.core.keys import OffloadKey
from kvstrata.core.results import LookupResult
from kvstrata.tiers.p2p.wire import State

Further = dict[tuple[str, ...], list[OffloadKey]]


@dataclass(slots=True)
class _Answer:
    """What is known of one key; `asked` are the peers that have not answered yet."""

    holders: list[tuple[str, int]] = field(default_factory=list)  # each with its life
    asked: set[str] = field(default_factory=set)
    later: tuple[str, ...] = ()  # to be asked if none of `asked` has it
    is_coming: bool = False
    until_s: float = 0.0


class Whereabouts:
    """A bounded cache of answers; positive ones are believed longer than negative ones.

    Thread: any. Blocks: for a short lock that is never held across I/O.
    """

    def __init__(
        self, clock: Clock, hit_ttl_s: float, miss_ttl_s: float, num_answers_max: int
    ) -> None:
        """Start knowing nothing."""
        self._clock = clock
        self._hit_ttl_s, self._miss_ttl_s = hit_ttl_s, miss_ttl_s
        self._num_answers_max = num_answers_max
        self._lock = threading.Lock()
        self._answers: OrderedDict[OffloadKey, _Answer] = OrderedDict()
        self._lives: defaultdict[str, int] = defaultdict(int)  # what a peer said holds for one
        self._epoch = 0

    def states(self, keys: Sequence[OffloadKey]) -> list[LookupResult | None]:
        """Say what is known of each key; None: it has to be asked."""
        with self._lock:
            now_s = self._clock.now_s()
            return [self._state(key, now_s) for key in keys]

    def _state(self, key: OffloadKey, now_s: float) -> LookupResult | None:
        answer = self._answers.get(key)
        if answer is None or (answer.until_s <= now_s and not answer.asked):
            return None
        if answer.holders and self._living(answer):
            return LookupResult.HIT
        if answer.asked:
            return LookupResult.RETRY
        if answer.holders:  # all of them were lost: others may have it
            return None
        return LookupResult.HIT_PENDING if answer.is_coming else LookupResult.MISS

    def _living(self, answer: _Answer) -> list[str]:
        return [peer for peer, life in answer.holders if self._lives[peer] == life]

    def holders(self, key: OffloadKey) -> Sequence[str] | None:
        """Return the peers that had the chunk when they last said so; None if that is not known."""
        with self._lock:
            answer = self._answers.get(key)
            if answer is None:
                return None
            living = self._living(answer)
            is_known_miss = not answer.holders and self._clock.now_s() < answer.until_s
            return living if living or is_known_miss else None

    def expect(
        self, keys: Iterable[OffloadKey], asked: Collection[str], later: Collection[str] = ()
    ) -> int:
        """Note that these peers are being asked, and that `later` are if none of them has it.

        Returns:
            What `learn` wants to know of the question: answers to old ones are void.
        """
        with self._lock:
            for key in keys:
                self._answers.pop(key, None)
                self._answers[key] = _Answer(asked=set(asked), later=tuple(later))
            while len(self._answers) > self._num_answers_max:
                self._answers.popitem(last=False)
            return self._epoch

    def learn(
        self, peer: str, keys: Sequence[OffloadKey], states: Sequence[int] | None, epoch: int
    ) -> Further:
        """Take in a peer's answer; `states` is None if there came none.

        Returns:
            Keys to ask further, by the peers to ask; they are noted as asked.
        """
        further: Further = {}
        with self._lock:
            for i, key in enumerate(keys) if epoch == self._epoch else ():
                state = State.MISS if states is None else states[i]
                holders = [peer] if state == State.HIT else []
                self._take(key, peer, holders, further, is_coming=state == State.WAIT)
        return further

    def learn_holders(
        self, source: str, keys: Sequence[OffloadKey], holders: Sequence[Sequence[str]], epoch: int
    ) -> Further:
        """Take in what a directory says, `holders[i]` of `keys[i]`; else as `learn`."""
        further: Further = {}
        with self._lock:
            for key, names in zip(keys, holders, strict=True) if epoch == self._epoch else ():
                self._take(key, source, names, further, is_coming=False)
        return further

    def _take(
        self,
        key: OffloadKey,
        source: str,
        holders: Sequence[str],
        further: Further,
        *,
        is_coming: bool,
    ) -> None:
        answer = self._answers.get(key)
        if answer is None or source not in answer.asked:
            return
        answer.asked.remove(source)
        answer.holders += [(name, self._lives[name]) for name in holders]
        answer.is_coming |= is_coming
        if answer.holders:
            answer.until_s = self._clock.now_s() + self._hit_ttl_s
        elif not answer.asked and answer.later and not answer.is_coming:
            further.setdefault(answer.later, []).append(key)
            answer.asked, answer.later = set(answer.later), ()
        else:
            answer.until_s = self._clock.now_s() + self._miss_ttl_s

    def correct(self, peer: str, key: OffloadKey) -> None:
        """Note that the peer does not have the chunk after all."""
        with self._lock:
            answer = self._answers.get(key)
            if answer is not None:
                answer.holders = [holder for holder in answer.holders if holder[0] != peer]
                answer.until_s = min(answer.until_s, self._clock.now_s() + self._miss_ttl_s)

    def forget_peer(self, peer: str) -> None:
        """Take back all that this peer said; questions to it are still open."""
        with self._lock:
            self._lives[peer] += 1

    def clear(self) -> None:
        """Forget everything; answers that are under way are void."""
        with self._lock:
            self._answers.clear()
            self._epoch += 1

    def __len__(self) -> int:
        """Return the number of keys that something is known of."""
        return len(self._answers)
