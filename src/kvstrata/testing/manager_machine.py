"""Any order of calls into a manager, legal or not, with real bytes, compared with a plain model."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from typing_extensions import override

from kvstrata.core.errors import ContractError
from kvstrata.core.events import PRIMARY_MEDIUM, EventKind
from kvstrata.core.keys import OffloadKey
from kvstrata.core.request import ReqContext
from kvstrata.core.results import LookupResult
from kvstrata.testing.chunks import chain, pattern, poison
from kvstrata.testing.clock import FakeClock
from kvstrata.testing.manager_base import ManagerSuiteBase
from kvstrata.testing.manager_calls import end_step

KEYS = (*chain("ab"), *chain("c"))
NUM_SLOTS = 2
CHUNK_BYTES = 48

some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4)
few_keys = st.sets(st.sampled_from(KEYS), max_size=2)
Copy = tuple[OffloadKey, int]


class _Request:
    """What the model knows of one request id."""

    def __init__(self, name: str) -> None:
        self.ctx = ReqContext(name)
        self.is_live = False
        self.loads: list[dict[OffloadKey, int]] = []  # open, each with its slots, the oldest first
        self.stores: list[Copy] = []

    def loading(self) -> list[Copy]:
        """Return every chunk that it loads, once for each load."""
        return [copy for load in self.loads for copy in load.items()]

    def end_load(self, keys: Collection[OffloadKey]) -> None:
        """End the load of exactly these keys, otherwise of each key the oldest one."""
        done = next((load for load in self.loads if load.keys() == set(keys)), None)
        if done is not None:
            self.loads.remove(done)
            return
        for key in set(keys):
            oldest = next((load for load in self.loads if key in load), {})
            oldest.pop(key, None)
        self.loads = [load for load in self.loads if load]


class ManagerMachine(RuleBasedStateMachine):
    """Three chunks, two slots, two requests.

    Bytes are written when a store is completed and verified as long as a load is open; until then,
    and after a chunk has left, its slot is poison. What is resident is learned from the events.
    """

    suite: ManagerSuiteBase

    requests = st.sampled_from((0, 1))

    @initialize()
    def begin(self) -> None:
        """Make the manager."""
        self.clock = self.suite.clock = FakeClock()
        self.manager = self.suite.make_manager(NUM_SLOTS, CHUNK_BYTES)
        self.known = [_Request("r0"), _Request("r1")]
        self.resident: set[OffloadKey] = set()
        self.writing: set[OffloadKey] = set()  # without those that were dropped meanwhile
        self.slot_of: dict[OffloadKey, int] = {}

    @override
    def teardown(self) -> None:
        """Close what was made."""
        if hasattr(self, "manager"):
            self.manager.shutdown(1.0)

    @rule(number=requests)
    def start(self, number: int) -> None:
        """Start a request, perhaps one that is live."""
        request = self.known[number]
        ctx = request.ctx if request.is_live else ReqContext(request.ctx.req_id)
        with self._legal_if(not request.is_live):
            self.manager.on_new_request(ctx)
            request.ctx, request.is_live = ctx, True

    @rule(number=requests)
    def finish(self, number: int) -> None:
        """End a request, perhaps one that is not live."""
        self.manager.on_request_finished(self.known[number].ctx)
        self.known[number].is_live = False

    @rule(number=requests, keys=some_keys)
    def touch(self, number: int, keys: list[OffloadKey]) -> None:
        """Use chunks."""
        self.manager.touch(keys, self.known[number].ctx)

    @rule(number=requests, keys=some_keys)
    def lookup(self, number: int, keys: list[OffloadKey]) -> None:
        """Ask for a prefix."""
        expected = 0
        while expected < len(keys) and keys[expected] in self.resident:
            expected += 1
        assert self.manager.lookup(keys, self.known[number].ctx) == expected

    @rule(number=requests, keys=some_keys)
    def prepare_load(self, number: int, keys: list[OffloadKey]) -> None:
        """Load chunks, perhaps some that are not there."""
        request = self.known[number]
        with self._legal_if(self.resident.issuperset(keys)):
            spec = self.manager.prepare_load(keys, request.ctx)
            assert list(spec.slots) == [self.slot_of[key] for key in keys]
            request.loads.append(dict(zip(keys, spec.slots, strict=True)))

    @rule(number=requests, keys=some_keys, failed=few_keys)
    def complete_load(self, number: int, keys: list[OffloadKey], failed: set[OffloadKey]) -> None:
        """Settle loads, perhaps some that are not open."""
        request = self.known[number]
        with self._legal_if(self._may_settle(request, request.loading(), keys)):
            self.manager.complete_load(keys, request.ctx, failed & set(keys))
            request.end_load(keys)

    @rule(number=requests, keys=some_keys)
    def prepare_store(self, number: int, keys: list[OffloadKey]) -> None:
        """Offer chunks."""
        request = self.known[number]
        open_stores = {key for key, _ in request.stores}  # also those that were dropped meanwhile
        here = self.resident | self.writing | open_stores
        new = [key for key in dict.fromkeys(keys) if key not in here]
        busy = {slot for _, slot in self._copies()}
        num_free = int(self.manager.get_stats()["num_free"])
        output = self.manager.prepare_store(keys, request.ctx)
        if output is None:
            assert new
            assert not num_free, "there is room"
            return
        taken, slots = list(output.keys_to_store), list(output.store_spec.slots)
        assert taken == new[: len(taken)]
        assert len(taken) >= min(num_free, len(new))
        assert len(set(slots)) == len(slots) == len(taken)
        assert not busy & set(slots), "a slot that a copy still uses"
        self._note_removals()
        assert not self.resident & set(output.evicted_keys)
        assert not {self.slot_of[key] for key in self.resident} & set(slots)
        for slot in slots:
            poison(self.manager.slots[slot])
        self.writing.update(taken)
        self.slot_of.update(zip(taken, slots, strict=True))
        request.stores += zip(taken, slots, strict=True)

    @rule(number=requests, keys=some_keys, failed=few_keys)
    def complete_store(self, number: int, keys: list[OffloadKey], failed: set[OffloadKey]) -> None:
        """Settle stores, perhaps some that are not open."""
        request = self.known[number]
        failed &= set(keys)
        is_legal = self._may_settle(request, request.stores, keys)
        if is_legal:
            for key, slot in _oldest(request.stores, keys):
                if key not in failed:
                    self.manager.slots[slot][:] = pattern(key, CHUNK_BYTES)
        with self._legal_if(is_legal):
            self.manager.complete_store(keys, request.ctx, failed)
            for key, slot in _settle(request.stores, keys):
                if key in self.writing and self.slot_of[key] == slot:
                    self.writing.remove(key)
                    if key not in failed:
                        self.resident.add(key)

    @rule(number=requests, failed=few_keys)
    def complete_what_is_open(self, number: int, failed: set[OffloadKey]) -> None:
        """Settle what a request has open, as engines do nearly always."""
        request = self.known[number]
        self.complete_store(number, [key for key, _ in request.stores], failed)
        for load in list(request.loads):
            self.complete_load(number, list(load), failed)

    @rule(keys=few_keys, number=requests)
    def delete(self, keys: set[OffloadKey], number: int) -> None:
        """Remove chunks, copied or not."""
        self.manager.delete(sorted(keys), self.known[number].ctx)
        self.writing -= keys

    @rule()
    def reset(self) -> None:
        """Remove everything."""
        self.manager.reset_cache()
        self.writing.clear()

    @rule(
        new=st.sets(requests), preempted=st.sets(requests), by_s=st.sampled_from((0.0, 1.0, 99.0))
    )
    def end(self, new: set[int], preempted: set[int], by_s: float) -> None:
        """End a step."""
        end_step(self.manager, [f"r{i}" for i in new], [f"r{i}" for i in preempted])
        self.clock.advance(by_s)

    @invariant()
    def model_and_manager_agree(self) -> None:
        """Compare everything that can be seen."""
        if not hasattr(self, "manager"):
            return
        stored = self._note_removals()
        assert stored <= self.resident
        check = getattr(self.manager, "check", None)
        if check is not None:
            check()
        for request in self.known:
            for key, slot in request.loading():
                assert self.manager.slots[slot] == pattern(key, CHUNK_BYTES), (
                    "a load's slot changed"
                )
        for key in self.resident:
            assert self.manager.slots[self.slot_of[key]] == pattern(key, CHUNK_BYTES)
        expected = [self._state(key) for key in KEYS]
        assert list(self.manager.lookup_states(KEYS, self.known[0].ctx)) == expected
        stats = self.manager.get_stats()
        assert stats["num_resident"] == len(self.resident)
        if stats["num_protected"]:  # it keeps slots of what was deleted
            assert stats["num_free"] <= self._num_free()
        else:
            assert stats["num_free"] == self._num_free()
        assert stats["num_writing"] == sum(len(request.stores) for request in self.known)
        assert stats["num_requests"] == sum(
            1 for request in self.known if request.is_live or request.loads or request.stores
        )
        assert self.manager.has_pending_work() == bool(list(self._copies()))

    def _legal_if(self, is_legal: bool) -> AbstractContextManager[object]:  # noqa: FBT001
        return nullcontext() if is_legal else pytest.raises(ContractError)

    @staticmethod
    def _may_settle(
        request: _Request, copies: Collection[Copy], keys: Iterable[OffloadKey]
    ) -> bool:
        return not request.is_live or {key for key, _ in copies}.issuperset(keys)

    def _copies(self) -> Iterable[Copy]:
        for request in self.known:
            yield from request.loading()
            yield from request.stores

    def _num_free(self) -> int:
        used = {self.slot_of[key] for key in self.resident} | {slot for _, slot in self._copies()}
        return NUM_SLOTS - len(used)

    def _state(self, key: OffloadKey) -> LookupResult:
        if key in self.resident:
            return LookupResult.HIT
        return LookupResult.HIT_PENDING if key in self.writing else LookupResult.MISS

    def _note_removals(self) -> set[OffloadKey]:
        """Take the events; poison the slots of what left, unless a load still reads them."""
        stored: set[OffloadKey] = set()
        for event in self.manager.take_events():
            assert event.medium == PRIMARY_MEDIUM
            gone: Collection[OffloadKey] = event.keys
            if event.kind is EventKind.STORED:
                stored.update(event.keys)
                continue
            if event.kind is EventKind.CLEARED:
                gone = set(self.resident)
            assert self.resident.issuperset(gone), "removed without having been there"
            self.resident.difference_update(gone)
            stored.difference_update(gone)
            read = {slot for request in self.known for _, slot in request.loading()}
            for key in gone:
                if self.slot_of[key] not in read:
                    poison(self.manager.slots[self.slot_of[key]])
        return stored


def _oldest(copies: Sequence[Copy], keys: Iterable[OffloadKey]) -> list[Copy]:
    """Return the oldest open copy of each distinct key."""
    return [
        next(copy for copy in copies if copy[0] == key)
        for key in dict.fromkeys(keys)
        if any(copy[0] == key for copy in copies)
    ]


def _settle(copies: list[Copy], keys: Iterable[OffloadKey]) -> list[Copy]:
    settled = _oldest(copies, keys)
    for copy in settled:
        copies.remove(copy)
    return settled
