"""Who holds which chunk, as far as peers said so lately."""

import math
import threading
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from kvstrata.core.clock import Clock
from kvstrata.core.keys import OffloadKey
from kvstrata.core.results import LookupResult
from kvstrata.tiers.p2p.wire import State

Further = dict[tuple[str, ...], list[OffloadKey]]


class _Said(NamedTuple):
    """What one source says of a key."""

    holders: tuple[str, ...]
    is_coming: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """What is known of a key; many keys share one, since they are asked and answered together.

    Attributes:
        asked: Peers that have not answered yet.
        later: Peers to be asked if none of `asked` has it.
        holders: Who has it, each with the life in which it said so.
        is_coming: Somebody is bringing it up.
        until_s: How long it is believed; for ever while somebody is asked.
    """

    asked: frozenset[str]
    later: tuple[str, ...]
    holders: tuple[tuple[str, int], ...] = ()
    is_coming: bool = False
    until_s: float = math.inf

    @property
    def result(self) -> LookupResult:
        if self.holders:
            return LookupResult.HIT
        if self.asked:
            return LookupResult.RETRY
        return LookupResult.HIT_PENDING if self.is_coming else LookupResult.MISS


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
        self._answers: dict[OffloadKey, _Answer] = {}
        self._lives: defaultdict[str, int] = defaultdict(int)  # what a peer said holds for one
        self._epoch = 0

    def states(self, keys: Sequence[OffloadKey]) -> list[LookupResult | None]:
        """Say what is known of each key; None: it has to be asked."""
        with self._lock:
            found = list(map(self._answers.get, keys))
            now_s = self._clock.now_s()
            results = {answer: self._result(answer, now_s) for answer in set(found)}
        if len(results) == 1:  # as a rule: keys are asked and answered together
            return list(results.values()) * len(found)
        return [results[answer] for answer in found]

    def _result(self, answer: _Answer | None, now_s: float) -> LookupResult | None:
        if answer is None or answer.until_s <= now_s:
            return None
        if answer.holders and not self._living(answer):  # all were lost: others may have it
            return LookupResult.RETRY if answer.asked else None
        return answer.result

    def _living(self, answer: _Answer) -> tuple[str, ...]:
        return tuple(peer for peer, life in answer.holders if self._lives[peer] == life)

    def holders(self, keys: Sequence[OffloadKey]) -> list[tuple[str, ...] | None]:
        """Return for each key who had it when last asked; None where that is not known."""
        with self._lock:
            found = list(map(self._answers.get, keys))
            now_s = self._clock.now_s()
            holders = {answer: self._holders(answer, now_s) for answer in set(found)}
        return [holders[answer] for answer in found]

    def _holders(self, answer: _Answer | None, now_s: float) -> tuple[str, ...] | None:
        if answer is None:
            return None
        living = self._living(answer)
        is_known_miss = not answer.holders and not answer.asked and now_s < answer.until_s
        return living if living or is_known_miss else None

    def expect(
        self, keys: Sequence[OffloadKey], asked: Collection[str], later: Collection[str] = ()
    ) -> int:
        """Note that these peers are being asked, and that `later` are if none of them has it.

        Returns:
            What `learn` wants to know of the question: answers to old ones are void.
        """
        with self._lock:
            if asked:
                answer = _Answer(frozenset(asked), tuple(later))
                self._answers.update(dict.fromkeys(keys, answer))
            num_over = len(self._answers) - self._num_answers_max
            for key in list(islice(self._answers, max(0, num_over))):
                del self._answers[key]
            return self._epoch

    def learn(
        self, peer: str, keys: Sequence[OffloadKey], states: Sequence[int] | None, epoch: int
    ) -> Further:
        """Take in a peer's answer; `states` is None if there came none.

        Returns:
            Keys to ask further, by the peers to ask; they are noted as asked.
        """
        if states is None:
            states = bytes(len(keys))  # State.MISS
        says = {
            state: _Said((peer,) if state == State.HIT else (), state == State.WAIT)
            for state in set(states)
        }
        return self._take(peer, keys, [says[state] for state in states], epoch)

    def learn_holders(
        self, source: str, keys: Sequence[OffloadKey], holders: Sequence[Sequence[str]], epoch: int
    ) -> Further:
        """Take in what a directory says, `holders[i]` of `keys[i]`; else as `learn`."""
        return self._take(
            source, keys, [_Said(tuple(names), is_coming=False) for names in holders], epoch
        )

    def _take(
        self,
        source: str,
        keys: Sequence[OffloadKey],
        says: Sequence[_Said],
        epoch: int,
    ) -> Further:
        further: Further = {}
        updated: dict[tuple[_Answer, _Said], _Answer] = {}
        with self._lock:
            for key, said in zip(keys, says, strict=True) if epoch == self._epoch else ():
                former = self._answers.get(key)
                if former is None or source not in former.asked:
                    continue
                answer = updated.get((former, said))
                if answer is None:
                    answer = updated[former, said] = self._updated(former, source, said)
                self._answers[key] = answer
                if former.later and not (answer.later or answer.holders):
                    further.setdefault(former.later, []).append(key)
        return further

    def _updated(self, former: _Answer, source: str, said: _Said) -> _Answer:
        holders = former.holders + tuple((name, self._lives[name]) for name in said.holders)
        asked, later = former.asked - {source}, former.later
        is_coming = former.is_coming or said.is_coming
        until_s = math.inf
        if holders:
            later, until_s = (), self._clock.now_s() + self._hit_ttl_s
        elif not asked and later and not is_coming:
            asked, later = frozenset(later), ()
        elif not asked:
            until_s = self._clock.now_s() + self._miss_ttl_s
        return _Answer(asked, later, holders, is_coming, until_s)

    def correct(self, peer: str, key: OffloadKey) -> None:
        """Note that the peer does not have the chunk after all."""
        with self._lock:
            answer = self._answers.get(key)
            if answer is not None:
                self._answers[key] = replace(
                    answer,
                    holders=tuple(holder for holder in answer.holders if holder[0] != peer),
                    until_s=min(answer.until_s, self._clock.now_s() + self._miss_ttl_s),
                )

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
