"""Learn on line how long it takes until a chunk is used again, per class of chunks."""

from collections.abc import Iterable
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstrata.core.keys import OffloadKey

Floats = npt.NDArray[np.float64]

EDGES_S: Final = (0.0, *(2.0 ** (k / 2) for k in range(26)))
"""Where the age bins begin: half octaves from 1 s to an hour and a half; the last has no end."""

_NUM_BINS: Final = len(EDGES_S)
_LOWER_S: Final = np.array(EDGES_S)
_UPPER_S: Final = _LOWER_S[1:]  # of all bins but the last
_WIDTH_S: Final = np.append(np.diff(_LOWER_S), _LOWER_S[-1])

# Every pair of an age and a horizon behind it, by age: pairs `_PAIRS_OF[a]` and on are those of age
# a. The arrays of all pairs stay so small that they are not mapped anew each time.
_FROM, _UNTIL = np.triu_indices(_NUM_BINS)
_PAIRS_OF: Final = np.searchsorted(_FROM, np.arange(_NUM_BINS))

_PRIOR: Final = np.array([0.15] + [0.05] * (_NUM_BINS - 1))
"""Chance of use within a bin before anything is known: so that what is older is worth less."""

_NUM_BORROWED: Final = 10.0  # samples that a class borrows from its group, a group from the total
_REQUESTS_PER_UPDATE_MAX: Final = 256
_UPDATES_PER_DOUBLING: Final = 16  # roughly, until then: what is known grows by a 16th
_NUM_SAMPLES_MIN: Final = 512
_NUM_SAMPLES_MAX: Final = 4096
_NUM_REMEMBERED: Final = 50_000  # samples after which what was learned counts half


class ReuseValue(NamedTuple):
    """What the curves say, per class and age bin.

    Attributes:
        rates: Most uses per chunk and second that holding a chunk of this age can bring.
        survival: Chance that a chunk of age 0 is not used before the end of the bin.
    """

    rates: list[list[float]]
    survival: list[list[float]]


class Mark:
    """What is remembered of a chunk that is watched, or that a request ended with.

    Attributes:
        end_s: When a request last ended with it; negative if none did.
        number: Of the sample that waits for its next use; -1 if none does.
        num_uses: Requests that used it while it was marked.
    """

    __slots__ = ("end_s", "num_uses", "number")

    def __init__(self) -> None:
        """Mark a chunk at a use."""
        self.end_s = -1.0
        self.number = -1
        self.num_uses = 1


class ReuseCurves:
    """Chance of use by age, per class; a class with few samples borrows from its group.

    A sample is one chunk at one use. It counts in an age bin once that bin lies in the past,
    whether or not the chunk is still stored, so chunks that were evicted, refused or never used
    again are not lost. Samples in flight are bounded: when there are too many, only every second
    request is sampled, or every fourth, and so on. So are marks: the oldest ends of requests go.
    """

    def __init__(self, capacity: int, num_groups: int = 1, num_kinds: int = 1) -> None:
        """Start without knowledge.

        Args:
            capacity: Of the tier; side tables are bounded by it.
            num_groups: Groups of classes.
            num_kinds: Classes in each; class `group * num_kinds + kind` is one.
        """
        self._shape = (num_groups, num_kinds, _NUM_BINS)
        self._hit, self._risk, self._num = (np.zeros(num_groups * num_kinds * _NUM_BINS),) * 3
        self._num_samples_max = min(_NUM_SAMPLES_MAX, max(_NUM_SAMPLES_MIN, capacity))
        self._marks: dict[OffloadKey, Mark] = {}  # oldest first
        self._staged: tuple[list[float], list[int], list[float]] = ([], [], [])  # as below
        self._closed: list[tuple[int, float]] = []  # number of a sample and the time of its use
        self._times_s, self._weights, self._ages_s = (np.empty(0),) * 3
        self._classes = np.empty(0, dtype=np.int64)
        self._first = 0  # number of the first sample in the arrays
        self._passed = np.zeros(_NUM_BINS - 1, dtype=np.int64)  # samples counted, per bin
        self._num_requests = self._num_since = 0
        self._stride = 1  # every so many-th request is sampled

    @property
    def num_in_flight(self) -> int:
        """Samples that still have bins before them."""
        return len(self._times_s) + len(self._staged[0])

    @property
    def is_sampling(self) -> bool:
        """Whether the request in hand is one of those that are sampled."""
        return self._num_requests % self._stride == 0

    @property
    def num_marks(self) -> int:
        """Chunks that are remembered here."""
        return len(self._marks)

    def note_use(self, keys: Iterable[OffloadKey], now_s: float) -> list[Mark]:
        """End the samples of these chunks; call it once a request, before `sample`.

        Returns the marks that the request meets on its path, in its order.
        """
        self._num_requests += 1
        self._num_since += 1
        marks, met = self._marks, []
        for key in list(filter(marks.__contains__, keys)):
            mark = marks.get(key)
            if mark is None:  # the key came before in this list
                continue
            mark.num_uses += 1
            if mark.number >= self._first:
                self._closed.append((mark.number, now_s))
                mark.number = -1
                if mark.end_s < 0:
                    del marks[key]
            met.append(mark)
        return met

    def mark_end(self, key: OffloadKey, now_s: float) -> Mark:
        """Remember that a request ends with this chunk."""
        mark = self._marks.pop(key, None) or Mark()
        mark.end_s = now_s
        self._marks[key] = mark
        return mark

    def sample(self, key: OffloadKey, class_idx: int, weight: int, now_s: float) -> None:
        """Watch a chunk that is used now; it stands for `weight` chunks of its class."""
        if not self.is_sampling:
            return
        mark = self._marks.get(key)
        if mark is None:
            mark = self._marks[key] = Mark()
        times_s, classes, weights = self._staged
        mark.number = self._first + len(self._times_s) + len(times_s)
        times_s.append(now_s)
        classes.append(class_idx)
        weights.append(weight)

    def update_if_due(self, now_s: float) -> bool:
        """Count what has passed, every so many requests; say whether it was due."""
        growth = self._num_requests // _UPDATES_PER_DOUBLING
        if self._num_since < min(growth, _REQUESTS_PER_UPDATE_MAX):
            return False
        self._num_since = 0
        self._take_staged()
        self._count(now_s)
        return True

    def _take_staged(self) -> None:
        times_s, classes, weights = self._staged
        if times_s:
            self._times_s = np.append(self._times_s, times_s)
            self._classes = np.append(self._classes, classes)
            self._weights = np.append(self._weights, weights)
            self._ages_s = np.append(self._ages_s, np.full(len(times_s), np.inf))
            self._staged = ([], [], [])
        if self._closed:
            numbers, used_s = zip(*self._closed, strict=True)
            places = np.array(numbers) - self._first
            self._ages_s[places] = np.array(used_s) - self._times_s[places]
            self._closed.clear()

    def _count(self, now_s: float) -> None:
        """Enter every sample into each bin that has passed since the last time."""
        ends = np.searchsorted(self._times_s, now_s - _UPPER_S, side="right")
        ends = np.maximum(ends, self._passed)
        counts = ends - self._passed
        if total := int(counts.sum()):
            bins = np.repeat(np.arange(_NUM_BINS - 1), counts)
            samples = np.arange(total) + np.repeat(ends - np.cumsum(counts), counts)
            at_risk = self._ages_s[samples] >= _LOWER_S[bins]
            bins, samples = bins[at_risk], samples[at_risk]
            cells, weights = self._classes[samples] * _NUM_BINS + bins, self._weights[samples]
            used = self._ages_s[samples] < _UPPER_S[bins]
            size = len(self._num)
            self._num = self._num + np.bincount(cells, minlength=size)
            self._risk = self._risk + np.bincount(cells, weights, minlength=size)
            self._hit = self._hit + np.bincount(cells[used], weights[used], minlength=size)
            if self._num.reshape(self._shape)[:, :, 0].sum() > _NUM_REMEMBERED:
                self._num, self._risk, self._hit = self._num / 2, self._risk / 2, self._hit / 2
        self._passed = ends
        self._keep(slice(int(ends[-1]), None))
        self._first += int(ends[-1])
        self._passed = self._passed - ends[-1]
        self._bound()

    def _keep(self, places: slice) -> None:
        self._times_s, self._classes = self._times_s[places], self._classes[places]
        self._weights, self._ages_s = self._weights[places], self._ages_s[places]

    def _bound(self) -> None:
        """Fit the stride to the samples in flight, and drop the marks that are too many or done."""
        if len(self._times_s) > self._num_samples_max:
            self._stride *= 2
            for mark in self._marks.values():
                place = mark.number - self._first
                mark.number = self._first + place // 2 if place >= 0 and place % 2 == 0 else -1
            self._keep(slice(None, None, 2))
            self._passed = (self._passed + 1) // 2
        elif self._stride > 1 and len(self._times_s) < self._num_samples_max // 4:
            self._stride //= 2
        num_over = len(self._marks) - 3 * self._num_samples_max // 2
        if num_over > 0:  # those of the samples stay: without them nothing is learned of great ages
            num_gone = num_over + self._num_samples_max // 4
            ends = (key for key, mark in self._marks.items() if mark.number < self._first)
            for key in list(islice(ends, num_gone)):
                del self._marks[key]

    def _chance(self) -> Floats:
        """Return per class and bin the chance of use within the bin, given none before; below 1."""
        hit, risk, num = (x.reshape(self._shape) for x in (self._hit, self._risk, self._num))
        chance = _PRIOR
        for axes in ((0, 1), (1,), ()):  # the total, the groups, the classes
            h, r, n = (x.sum(axis=axes, keepdims=True) if axes else x for x in (hit, risk, num))
            borrowed = _NUM_BORROWED * np.where(n > 0, r / np.maximum(n, 1e-9), 1.0)
            chance = (h + borrowed * chance) / (r + borrowed)
        return chance.reshape(-1, _NUM_BINS)

    def value(self) -> ReuseValue:
        """Weigh every horizon from every age: uses won against time held, both as expectations."""
        uses, held_s, survival = _sums(self._chance())
        uses, held_s = uses.T, held_s.T
        rates = (uses[_FROM] - uses[_UNTIL + 1]) / (held_s[_FROM] - held_s[_UNTIL + 1])
        best = np.maximum.reduceat(rates, _PAIRS_OF, axis=0)
        return ReuseValue(best.T.tolist(), survival.tolist())

    def horizon_s(self) -> float:
        """Return for how long to hold a chunk that was just used, of the first class."""
        uses, held_s, _ = _sums(self._chance()[:1])
        rates = (uses[0, 0] - uses[0, 1:]) / (held_s[0, 0] - held_s[0, 1:])
        best = int(rates.argmax())
        return float(_LOWER_S[best] + _WIDTH_S[best])


def _sums(chance: Floats) -> tuple[Floats, Floats, Floats]:
    """Add up from the end, so that small numbers stay exact: uses, time held; and survival.

    The difference of two entries, divided by the survival to the first, is what is to be expected
    between the two ages from the first on.
    """
    survival = np.cumprod(1.0 - chance, axis=1).astype(np.float64, copy=False)
    reach = np.concatenate([np.ones((len(chance), 1)), survival[:, :-1]], axis=1)
    zero = np.zeros((len(chance), 1))
    uses = np.concatenate([reach * chance, zero], axis=1)
    held_s = np.concatenate([reach * (_WIDTH_S * (1.0 - 0.5 * chance)), zero], axis=1)
    return (
        np.cumsum(uses[:, ::-1], axis=1)[:, ::-1],
        np.cumsum(held_s[:, ::-1], axis=1)[:, ::-1],
        survival,
    )
