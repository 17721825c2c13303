"""Which chunk is in which slot, in runs: free slots, what is being written, what is held."""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import filterfalse
from operator import eq

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import Run, Victim
from kvstrata.primary.dropped_runs import DroppedRuns


@dataclass(slots=True)
class Held:
    """Distinct chunks that something holds, and where the table stood when it took hold."""

    keys: list[OffloadKey]
    runs: list[Run]
    num_splits: int
    epoch: int


Settled = tuple[list[Run], list[OffloadKey], list[OffloadKey], int]
"""Runs that can be loaded now, their keys, keys whose copy failed, and chunks in all."""


class RunTable:
    """Every slot is free or in one run; every key of the table is in one run.

    A run is being written by one owner, or resident. Holds forbid that it leaves. A run that is
    dropped all the same keeps its slots until its owner settled it or its last hold is gone, so
    that an old copy never meets new content.

    Per key there is one entry of one dictionary; the rest is comparing and slicing lists, since a
    request's keys are the keys of a few runs, one behind the other.
    """

    def __init__(self, num_slots: int, on_split: Callable[[Run, Run], None]) -> None:
        """Start with all slots free.

        Args:
            num_slots: Number of slots.
            on_split: Called with (head, tail) when a run with keys in the table became two.
        """
        self.num_slots = num_slots
        self._on_split = on_split
        self.free = list(range(num_slots - 1, -1, -1))
        """Slots that hold nothing; not to be changed from outside."""
        self._run_of: dict[OffloadKey, Run] = {}
        self.dropped = DroppedRuns()
        self._epoch = 0  # counts drops: tells a hold on what was dropped from one on what is here
        self._num_splits = 0
        # The keys that were found last to have no slot; whoever touches chunks often stores soon.
        self._known_absent: Sequence[OffloadKey] = ()

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._run_of)

    def __contains__(self, key: object) -> bool:
        """Say whether the key has a slot, resident or being written."""
        return key in self._run_of

    def find(self, key: OffloadKey) -> Run | None:
        """Return the run that holds the key."""
        return self._run_of.get(key)

    def all_keys(self) -> list[OffloadKey]:
        """Return every key, in no particular order."""
        return list(self._run_of)

    def all_runs(self) -> tuple[list[Run], list[Run]]:
        """Return the runs with keys in the table, and the dropped ones. Scans everything."""
        here = list(dict.fromkeys(list(self._run_of.values())))
        return here, [run for _, run in list(self.dropped.runs)]

    def count_prefix(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many keys, from the first on, are resident."""
        find, count, num_keys = self._run_of.get, 0, len(keys)
        while count < num_keys:
            run = find(keys[count])
            if run is None or run.owner is not None:
                break
            run_keys = run.keys
            end = count + len(run_keys)
            if keys[count:end] == run_keys:  # by far the usual case, and faster than what follows
                count = end
                continue
            start = run_keys.index(keys[count])
            count += _num_common(run_keys, start, keys, count)
        return count

    def absent(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the distinct keys that have no slot, in order."""
        if self._known_absent == keys:
            absent = list(keys)
        else:
            absent = list(filterfalse(self._run_of.__contains__, keys))
        return absent if len(set(absent)) == len(absent) else list(dict.fromkeys(absent))

    def resident_runs(self, keys: Sequence[OffloadKey]) -> list[Run]:
        """Return the runs, each once, that hold exactly the resident ones of `keys`.

        Runs are split at the edges.
        """
        run_of, at, num_keys = self._run_of, 0, len(keys)
        runs: list[Run] = []
        while at < num_keys:
            run = run_of.get(keys[at])
            if run is None:
                rest = keys[at:]
                if run_of.keys().isdisjoint(rest):
                    self._known_absent = rest
                    break
                at += next(i for i, key in enumerate(rest) if key in run_of)
            elif run.owner is not None or run in runs:  # the latter: this key came before
                at += 1
            else:
                end = at + len(run.keys)
                if keys[at:end] != run.keys:
                    run = self._cut_out(run, keys, at)
                    end = at + len(run.keys)
                runs.append(run)
                at = end
        return runs

    def _cut_out(self, run: Run, keys: Sequence[OffloadKey], at: int) -> Run:
        """Make a run of the chunks that `run` has in common with `keys` from `at` on."""
        start = 0 if run.keys[0] == keys[at] else run.keys.index(keys[at])
        if start:
            self._split(run, start)
        num_common = _num_common(run.keys, 0, keys, at)
        return run if num_common == len(run.keys) else self._split(run, num_common)

    def _split(self, run: Run, count: int) -> Run:
        """Take the first `count` chunks out into a run of their own and return that."""
        self._num_splits += 1
        head = Run(run.keys[:count], run.slots[:count], run.owner)
        del run.keys[:count], run.slots[:count]
        head.num_holds, head.is_dropped = run.num_holds, run.is_dropped
        head.priority, head.pool, head.expires_at_s = run.priority, run.pool, run.expires_at_s
        head.parent, run.parent, head.num_children = run.parent, head, 1
        if run.is_dropped:
            self.dropped.add_head(head, run)
        else:
            self._enter(head.keys, head)
            self._on_split(head, run)
        return head

    def _enter(self, keys: Iterable[OffloadKey], run: Run) -> None:
        self._known_absent = ()
        run_of = self._run_of
        for key in keys:  # twice as fast as update(fromkeys()), which builds a second dictionary
            run_of[key] = run

    def reserve(self, keys: list[OffloadKey], owner: Hashable, parent: Run | None = None) -> Run:
        """Give absent, distinct keys, at least one, free slots, written by `owner` from now on.

        The run continues `parent`.
        """
        free, count = self.free, len(keys)
        run = Run(keys, free[-count:], owner)
        del free[-count:]
        run.num_holds = 1  # the copy into it
        self._enter(keys, run)
        if parent is not None:
            run.parent = parent
            parent.num_children += 1
        return run

    def join(self, run: Run) -> None:
        """Make a run the end of its parent, which has no other child."""
        head = run.parent
        assert head is not None
        assert head.num_children == 1
        assert not run.num_children
        self._enter(run.keys, head)
        head.keys += run.keys
        head.slots += run.slots
        head.num_children = 0
        run.keys, run.slots, run.parent = [], [], None
        self._num_splits += 1  # runs that somebody remembers are not what they were

    def written_by(
        self, owner: Hashable, keys: Collection[OffloadKey]
    ) -> tuple[list[Run], list[OffloadKey]]:
        """Return the owner's runs that hold exactly those of `keys` that it writes, and the rest.

        Dropped runs are included. Keys may repeat and come in any order.
        """
        runs: list[Run] = []
        unknown: list[OffloadKey] = []
        distinct = list(dict.fromkeys(keys))
        at = 0
        while at < len(distinct):
            run = self._run_of.get(distinct[at])
            if run is None or run.owner is not owner:
                run = self.dropped.find_write(owner, distinct[at])
            if run is None:
                unknown.append(distinct[at])
                at += 1
            else:
                runs.append(self._cut_out(run, distinct, at))
                at += len(runs[-1].keys)
        return runs, unknown

    def settle(self, runs: Iterable[Run], failed: Collection[OffloadKey]) -> Settled:
        """End the writing of runs: chunks become resident, failed ones free their slots.

        Failed and dropped chunks are forgotten; the caller must tell the policy of the failed runs
        beforehand; `split_by` makes each run wholly failed or wholly not.
        """
        resident: list[Run] = []
        stored: list[OffloadKey] = []
        lost: list[OffloadKey] = []
        num_settled = 0
        for run in runs:
            num_settled += len(run.keys)
            run.owner = None
            run.num_holds -= 1
            if run.is_dropped:
                self._release_dropped(run)
            elif failed and run.keys[0] in failed:
                lost += run.keys
                self._forget(run)
            else:
                resident.append(run)
                stored += run.keys
        return resident, stored, lost, num_settled

    def split_by(self, runs: Iterable[Run], keys: Collection[OffloadKey]) -> list[Run]:
        """Split runs so that each lies wholly inside or wholly outside of `keys`."""
        pieces = []
        for run in runs:
            while True:
                is_inside = run.keys[0] in keys
                count = next(
                    (i for i, key in enumerate(run.keys) if (key in keys) != is_inside), None
                )
                if count is None:
                    break
                pieces.append(self._split(run, count))
            pieces.append(run)
        return pieces

    def cut_tails(self, victims: Iterable[Victim]) -> list[OffloadKey]:
        """Free the last chunks of runs that nothing holds; return their keys."""
        run_of, free = self._run_of, self.free
        gone: list[OffloadKey] = []
        for run, count in victims:
            keys, slots = run.keys, run.slots
            if count == len(keys):
                gone += keys
                free += slots
                run.keys, run.slots = [], []
                parent = run.parent
                if parent is not None:
                    parent.num_children -= 1
                    run.parent = None
            else:
                gone += keys[-count:]
                free += slots[-count:]
                del keys[-count:], slots[-count:]
        for key in gone:
            del run_of[key]
        return gone

    def hold(self, runs: list[Run], keys: list[OffloadKey] | None = None) -> Held:
        """Forbid that distinct resident runs leave, one time more each.

        Args:
            runs: From `resident_runs`, just now.
            keys: All their keys in order, where the caller has them at hand.
        """
        for run in runs:
            run.num_holds += 1
        if keys is None:
            keys = [key for run in runs for key in run.keys]
        return Held(keys, runs, self._num_splits, self._epoch)

    def unhold(self, held: Held) -> None:
        """Take back a hold."""
        runs = held.runs
        if held.num_splits != self._num_splits or held.epoch != self._epoch:
            keys = held.keys
            if self.dropped.runs:
                keys = self._unhold_dropped(keys, held.epoch)
            runs = self.resident_runs(keys)
        for run in runs:
            run.num_holds -= 1

    def _unhold_dropped(self, keys: Sequence[OffloadKey], epoch: int) -> list[OffloadKey]:
        """Do it for keys that were dropped since; return the others."""
        here = []
        for key in keys:
            found = self.dropped.find_held(key, epoch)
            if found is None:
                here.append(key)
                continue
            run = self._cut_out(found, [key], 0)
            run.num_holds -= 1
            if not run.num_holds:
                self._release_dropped(run)
        return here

    def runs_with(self, keys: Iterable[OffloadKey]) -> list[Run]:
        """Return the runs that hold exactly those of `keys` that have slots, split at the edges."""
        distinct = [key for key in dict.fromkeys(keys) if key in self._run_of]
        runs: list[Run] = []
        at = 0
        while at < len(distinct):
            runs.append(self._cut_out(self._run_of[distinct[at]], distinct, at))
            at += len(runs[-1].keys)
        return runs

    def drop(self, runs: Iterable[Run]) -> list[OffloadKey]:
        """Forget runs whatever uses them; return the keys that were resident.

        Slots that no copy uses are free at once, the others when their copies have been settled.
        """
        gone = []
        for run in runs:
            if run.owner is None:
                gone += run.keys
            if not run.num_holds:
                self._forget(run)
                continue
            for key in run.keys:
                del self._run_of[key]
            self._leave_parent(run)
            self.dropped.add(self._epoch, run)
        self._epoch += 1
        return gone

    def _forget(self, run: Run) -> None:
        self.free += run.slots
        for key in run.keys:
            del self._run_of[key]
        run.keys, run.slots = [], []
        self._leave_parent(run)

    def _release_dropped(self, run: Run) -> None:
        self.free += run.slots
        self.dropped.remove(run)

    @staticmethod
    def _leave_parent(run: Run) -> None:
        if run.parent is not None:
            run.parent.num_children -= 1
            run.parent = None

    def check(self) -> None:
        """Assert that every slot and every key is in exactly one place."""
        here, dropped = self.all_runs()
        held = [slot for run in here + dropped for slot in run.slots]
        assert sorted(held + self.free) == list(range(self.num_slots))
        assert sorted(key for run in here for key in run.keys) == sorted(self._run_of)
        for run in here:
            assert len(run.keys) == len(run.slots) > 0
            assert all(self._run_of[key] is run for key in run.keys)
            assert run.num_holds >= (run.owner is not None)
            assert not run.is_dropped
            assert run.num_children == sum(1 for other in here if other.parent is run)
        for run in dropped:
            assert run.is_dropped
            assert run.num_holds > 0


def _num_common(run_keys: list[OffloadKey], start: int, keys: Sequence[OffloadKey], at: int) -> int:
    """Return how many keys are equal, from `run_keys[start]` and `keys[at]` on."""
    ours = run_keys[start : start + len(keys) - at]
    theirs = keys[at : at + len(ours)]
    if ours == theirs:
        return len(ours)
    return [*map(eq, ours, theirs), False].index(False)
