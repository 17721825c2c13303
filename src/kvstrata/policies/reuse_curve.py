"""Learn on line how long it takes until a chunk is used again, per class of chunks."""

from collections.abc import Iterable
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

_PRIOR: Final = 0.05  # chance of use within a bin before anything is known
_NUM_BORROWED: Final = 10.0  # samples that a class borrows from its group, a group from the total
_REQUESTS_PER_UPDATE: Final = 64
_NUM_REMEMBERED: Final = 50_000  # samples after which what was learned counts half


class ReuseValue(NamedTuple):
    """What the curves say, per class and age bin.

    Attributes:
        rates: Most uses per chunk and second that holding a chunk of this age can bring.
        horizons_s: For how long to hold it for that.
        survival: Chance that a chunk of age 0 is not used before the end of the bin.
    """

    rates: list[list[float]]
    horizons_s: list[list[float]]
    survival: list[list[float]]


class ReuseCurves:
    """Chance of use by age, per class; a class with few samples borrows from its group.

    A sample is one chunk at one use. It counts in an age bin once that bin lies in the past,
    whether or not the chunk is still stored, so chunks that were evicted, refused or never used
    again are not lost. Samples in flight are bounded: when there are too many, only every second
    request is sampled, or every fourth, and so on.
    """

    def __init__(
        self, num_groups: int = 1, num_kinds: int = 1, num_samples_max: int = 8192
    ) -> None:
        """Start without knowledge; class `group * num_kinds + kind` is one of so many."""
        self._shape = (num_groups, num_kinds, _NUM_BINS)
        self._hit, self._risk, self._num = (np.zeros(num_groups * num_kinds * _NUM_BINS),) * 3
        self._num_samples_max = num_samples_max
        self._open: dict[OffloadKey, int] = {}  # chunk -> number of its sample, oldest first
        self._staged: list[tuple[float, int, float]] = []  # time, class, weight
        self._closed: list[tuple[int, float]] = []  # number of a sample and the age at its use
        self._times_s, self._weights, self._ages_s = (np.empty(0),) * 3
        self._classes = np.empty(0, dtype=np.int64)
        self._first = 0  # number of the first sample in the arrays
        self._passed = np.zeros(_NUM_BINS - 1, dtype=np.int64)  # samples counted, per bin
        self._num_requests = self._num_since = 0
        self._stride = 1  # every so many-th request is sampled
        self.value = self._evaluate()

    @property
    def num_in_flight(self) -> int:
        """Samples that still have bins before them."""
        return len(self._times_s) + len(self._staged)

    def note_use(self, keys: Iterable[OffloadKey], now_s: float) -> None:
        """End the samples of these chunks; call it once a request, before `sample`."""
        self._num_requests += 1
        self._num_since += 1
        number_of, first, staged = self._open, self._first, self._staged
        num_counted = len(self._times_s)
        for key in list(filter(number_of.__contains__, keys)):
            number = number_of.pop(key, None)
            if number is None:
                continue
            place = number - first
            if place < num_counted:
                self._closed.append((number, now_s - float(self._times_s[place])))
            else:
                self._closed.append((number, now_s - staged[place - num_counted][0]))

    def sample(self, key: OffloadKey, class_idx: int, weight: int, now_s: float) -> None:
        """Watch a chunk that is used now; it stands for `weight` chunks of its class."""
        if self._num_requests % self._stride:
            return
        self._open.pop(key, None)
        self._open[key] = self._first + self.num_in_flight
        self._staged.append((now_s, class_idx, float(weight)))

    def update_if_due(self, now_s: float) -> bool:
        """Count what has passed, and make `value` anew, every 64 requests; early on more often."""
        num = self._num_requests
        if self._num_since < _REQUESTS_PER_UPDATE and num & (num - 1):
            return False
        self._num_since = 0
        self._take_staged()
        self._count(now_s)
        self.value = self._evaluate()
        return True

    def _take_staged(self) -> None:
        times_s, classes, weights = zip(*self._staged, strict=True) if self._staged else ((),) * 3
        self._times_s = np.append(self._times_s, times_s)
        self._classes = np.append(self._classes, np.array(classes, dtype=np.int64))
        self._weights = np.append(self._weights, weights)
        self._ages_s = np.append(self._ages_s, np.full(len(self._staged), np.inf))
        self._staged.clear()
        if self._closed:
            numbers, ages_s = zip(*self._closed, strict=True)
            self._ages_s[np.array(numbers) - self._first] = ages_s
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
        self._forget(int(ends[-1]))

    def _forget(self, num_done: int) -> None:
        """Drop the samples that have no bin before them, and fit the stride to what is left."""
        self._first += num_done
        self._passed = self._passed - num_done
        self._times_s, self._classes = self._times_s[num_done:], self._classes[num_done:]
        self._weights, self._ages_s = self._weights[num_done:], self._ages_s[num_done:]
        stale = []
        for key, number in self._open.items():
            if number >= self._first:
                break
            stale.append(key)
        for key in stale:
            del self._open[key]
        if len(self._times_s) > self._num_samples_max:
            self._stride *= 2
            self._thin()
        elif self._stride > 1 and len(self._times_s) < self._num_samples_max // 4:
            self._stride //= 2

    def _thin(self) -> None:
        """Drop every second sample in flight."""
        kept = np.arange(0, len(self._times_s), 2)
        place_of = {self._first + int(old): self._first + new for new, old in enumerate(kept)}
        self._open = {k: place_of[n] for k, n in self._open.items() if n in place_of}
        self._passed = (self._passed + 1) // 2
        self._times_s, self._classes = self._times_s[kept], self._classes[kept]
        self._weights, self._ages_s = self._weights[kept], self._ages_s[kept]

    def _evaluate(self) -> ReuseValue:
        hit, risk, num = (x.reshape(self._shape) for x in (self._hit, self._risk, self._num))
        chance = np.full(_NUM_BINS, _PRIOR)
        for axes in ((0, 1), (1,), ()):  # the total, the groups, the classes
            h, r, n = (x.sum(axis=axes, keepdims=True) if axes else x for x in (hit, risk, num))
            borrowed = _NUM_BORROWED * np.where(n > 0, r / np.maximum(n, 1e-9), 1.0)
            chance = (h + borrowed * chance) / (r + borrowed)
        return _value_of(chance.reshape(-1, _NUM_BINS))


def _value_of(chance: Floats) -> ReuseValue:
    """Weigh every horizon, from every age: uses won against time held, both as expectations.

    Args:
        chance: Per class and bin, chance of use within the bin given none before; less than 1.
    """
    # Per class and age: reach is the chance to come to this bin unused.
    reach, uses, held_s = np.ones_like(chance), np.zeros_like(chance), np.zeros_like(chance)
    rates, horizons_s = np.zeros_like(chance), np.zeros_like(chance)
    for now in range(_NUM_BINS):
        ages = slice(now + 1)  # the bin lies ahead for these
        lost = chance[:, now, None]
        uses[:, ages] += reach[:, ages] * lost
        held_s[:, ages] += reach[:, ages] * (_WIDTH_S[now] * (1.0 - 0.5 * lost))
        reach[:, ages] *= 1.0 - lost
        rate = uses[:, ages] / held_s[:, ages]
        better = rate > rates[:, ages]
        rates[:, ages][better] = rate[better]
        horizons_s[:, ages][better] = _LOWER_S[now] + _WIDTH_S[now]
    survival = np.cumprod(1.0 - chance, axis=1)
    return ReuseValue(rates.tolist(), horizons_s.tolist(), survival.tolist())
