"""The order in which a tier's chunks leave: lower priorities first, then the longest unused."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import Final, NamedTuple

from kvstrata.core.keys import OffloadKey
from kvstrata.core.request import PRIORITY_DEFAULT, ReqContext

NUM_KEYS_AT_A_TIME: Final = 1024

consume = deque[object](maxlen=0).extend
"""Runs an iterator to its end, in C."""


TIME_STEP_S: Final = 1e-6
"""A chunk's time of last use is this much before that of the chunk in front of it."""


@dataclass(slots=True)
class Trail:
    """The chunks that one request has used or stored in this tier, in prefix order.

    `next_time_s` is the time of last use of the next chunk that it stores; None before the first.
    """

    priority: int = PRIORITY_DEFAULT
    keys: dict[OffloadKey, None] = field(default_factory=dict)
    next_time_s: float | None = None

    def take_time_s(self, now_s: float) -> float:
        """Return the time of last use to be noted of a chunk that is stored now.

        Where the order has to be found again from times alone, tails leave before heads by it.
        """
        time_s = now_s if self.next_time_s is None else self.next_time_s
        self.next_time_s = time_s - TIME_STEP_S
        return time_s


class Trails:
    """One trail for each live request. Not thread-safe."""

    def __init__(self) -> None:
        self._trails: dict[str, Trail] = {}

    def start(self, ctx: ReqContext) -> None:
        """Begin a request."""
        self._trails[ctx.req_id] = Trail(ctx.hints.priority)

    def end(self, ctx: ReqContext) -> None:
        """Forget a request; jobs that have its trail keep it."""
        self._trails.pop(ctx.req_id, None)

    def of(self, ctx: ReqContext | None) -> Trail:
        """Return the request's trail; a new one for a request that is not live, or for none."""
        if ctx is None:
            return Trail()
        return self._trails.get(ctx.req_id) or Trail(ctx.hints.priority)


class _Use(NamedTuple):
    trail: Trail
    keys: Sequence[OffloadKey]
    at_s: float | None


class RecencyOrder:
    """Keys by priority class and time of last use. Not thread-safe, but for `note_use`.

    Within a request tails leave before heads, once a use was noted after the last `add`.
    """

    def __init__(self) -> None:
        self._uses: deque[_Use] = deque()
        self._classes: dict[int, OrderedDict[OffloadKey, None]] = {}  # longest unused first
        self._priority: dict[OffloadKey, int] = {}

    def __len__(self) -> int:
        return len(self._priority)

    def __contains__(self, key: object) -> bool:
        return key in self._priority

    def add(self, trail: Trail, key: OffloadKey) -> None:
        """Take in a key that is not there; it continues the request's trail."""
        trail.keys[key] = None
        self._priority[key] = trail.priority
        self._classes.setdefault(trail.priority, OrderedDict())[key] = None

    @property
    def is_behind(self) -> bool:
        """Whether a use was noted that `catch_up` has not taken in. Thread: any."""
        return bool(self._uses)

    def note_use(
        self, trail: Trail, keys: Sequence[OffloadKey] = (), at_s: float | None = None
    ) -> None:
        """Note that a request uses chunks, in prefix order; it counts from `catch_up` on.

        All of its trail counts as used, from its end to its start. A chunk keeps the highest
        priority that it was used with. Costs nothing for each key. Thread: any.
        """
        self._uses.append(_Use(trail, keys, at_s))

    def catch_up(self) -> Iterator[tuple[Sequence[OffloadKey], float | None]]:
        """Take in what was noted, some keys at a time, so that a lock need not be held for long.

        Yields keys that are here and were used, and when.
        """
        while self._uses:
            use = trail, keys, at_s = self._uses[0]
            if keys:
                trail.keys = dict.fromkeys(keys) | trail.keys
            used = list(reversed(trail.keys))
            for start in range(0, len(used), NUM_KEYS_AT_A_TIME):
                part = used[start : start + NUM_KEYS_AT_A_TIME]
                here = [key for key in part if key in self._priority]
                self._move(here, trail.priority)
                yield here, at_s
            if self._uses and self._uses[0] is use:  # not cleared meanwhile
                self._uses.popleft()

    def _move(self, keys: Sequence[OffloadKey], priority: int) -> None:
        """Put keys at the young end of their class, or of this one if it is higher."""
        for lower in [each for each in self._classes if each < priority]:
            for key in [key for key in keys if key in self._classes[lower]]:
                del self._classes[lower][key]
                self._priority[key] = priority
                self._classes.setdefault(priority, OrderedDict())[key] = None
        for order in self._classes.values():
            is_only = len(order) == len(self._priority)
            among = keys if is_only else [key for key in keys if key in order]
            consume(map(order.move_to_end, among))

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        """Forget keys; those that are not there are ignored."""
        for key in keys:
            priority = self._priority.pop(key, None)
            if priority is not None:
                del self._classes[priority][key]

    def clear(self) -> None:
        """Forget everything."""
        self._uses.clear()
        self._classes.clear()
        self._priority.clear()

    def choose(
        self, count: int, trail: Trail, may_leave: Callable[[OffloadKey], bool]
    ) -> list[OffloadKey]:
        """Name up to `count` keys that leave for this request; nothing is forgotten yet.

        None of its own trail, none of a higher priority, and none that may not leave.
        """
        victims: list[OffloadKey] = []
        if count <= 0:
            return victims
        lower = sorted(each for each in self._classes if each <= trail.priority)
        for key in chain.from_iterable(self._classes[each] for each in lower):
            if key not in trail.keys and may_leave(key):
                victims.append(key)
                if len(victims) == count:
                    break
        return victims

    def unused(self, is_idle: Callable[[OffloadKey], bool]) -> list[OffloadKey]:
        """Return the longest unused keys of each class, as far as they are idle."""
        return [key for order in self._classes.values() for key in takewhile(is_idle, order)]

    def check(self) -> None:
        """Assert every invariant."""
        listed = {key: prio for prio, order in self._classes.items() for key in order}
        assert listed == self._priority
