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


class ModelRequest:
    """What the model knows of one request id.

    Attributes:
        tag: What its tenant puts in front of its keys.
        is_barred: Nothing of it is stored, since it began with other weights.
    """

    def __init__(self, name: str) -> None:
        self.ctx = ReqContext(name)
        self.tag = b""
        self.is_live = False
        self.is_barred = False
        self.loads: list[dict[OffloadKey, int]] = []  # open, each with its slots, the oldest first
        self.stores: list[Copy] = []

    def named(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return keys of the request as events name them."""
        return [OffloadKey(self.tag + key) for key in keys]

    def own(self, named: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return keys as the request says them."""
        return [OffloadKey(key[len(self.tag) :]) for key in named]

    @property
    def may_store(self) -> bool:
        """Whether anything of it is stored."""
        return self.ctx.hints.store and not self.is_barred

    def num_usable(self, num_resident: int) -> int:
        """Return how many chunks of a prefix that is resident it may load."""
        limit = self.ctx.hints.max_load_tokens  # a chunk has one token
        return num_resident if limit is None else min(limit, num_resident)

    @property
    def is_known(self) -> bool:
        """Whether the manager has to remember it."""
        return bool(self.is_live or self.loads or self.stores)

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

    A subclass may take more of each, and start requests with hints.
    """

    suite: ManagerSuiteBase
    keys: Sequence[OffloadKey] = KEYS
    num_slots = NUM_SLOTS
    num_requests = 2
    has_quotas = False  # free slots may be refused

    requests = st.sampled_from((0, 1))

    @initialize()
    def begin(self) -> None:
        """Make the manager."""
        self.clock = self.suite.clock = FakeClock()
        self.manager = self.suite.make_manager(self.num_slots, CHUNK_BYTES)
        self.known = [ModelRequest(f"r{i}") for i in range(self.num_requests)]
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
        request = self.known[number]
        found = self.manager.lookup(keys, request.ctx)
        self.note_removals()
        named = request.named(keys)
        num_resident = 0
        while num_resident < len(named) and named[num_resident] in self.resident:
            num_resident += 1
        assert found == request.num_usable(num_resident)

    @rule(number=requests, keys=some_keys)
    def prepare_load(self, number: int, keys: list[OffloadKey]) -> None:
        """Load chunks, perhaps some that are not there."""
        request = self.known[number]
        named = request.named(keys)
        with self._legal_if(self.resident.issuperset(named)):
            spec = self.manager.prepare_load(keys, request.ctx)
            assert list(spec.slots) == [self.slot_of[key] for key in named]
            request.loads.append(dict(zip(named, spec.slots, strict=True)))

    @rule(number=requests, keys=some_keys, failed=few_keys)
    def complete_load(self, number: int, keys: list[OffloadKey], failed: set[OffloadKey]) -> None:
        """Settle loads, perhaps some that are not open."""
        request = self.known[number]
        named = request.named(keys)
        with self._legal_if(self._may_settle(request, request.loading(), named)):
            self.manager.complete_load(keys, request.ctx, failed & set(keys))
            request.end_load(named)

    @rule(number=requests, keys=some_keys)
    def prepare_store(self, number: int, keys: list[OffloadKey]) -> None:
        """Offer chunks."""
        request, before = self.known[number], set(self.resident)
        open_stores = {key for key, _ in request.stores}  # also those that were dropped meanwhile
        here = self.resident | self.writing | open_stores
        new = [key for key in dict.fromkeys(request.named(keys)) if key not in here]
        busy = {slot for _, slot in self.copies()}
        num_free = int(self.manager.get_stats()["num_free"])
        output = self.manager.prepare_store(keys, request.ctx)
        if output is None:
            assert new
            assert not num_free or self.has_quotas, "there is room"
            return
        taken, slots = request.named(output.keys_to_store), list(output.store_spec.slots)
        assert taken == new[: len(taken)]
        if not request.may_store:
            assert not taken
        elif not self.has_quotas:
            assert len(taken) >= min(num_free, len(new))
        assert len(set(slots)) == len(slots) == len(taken)
        assert not busy & set(slots), "a slot that a copy still uses"
        self.note_removals()
        assert sorted(output.evicted_keys) == sorted(before - self.resident)
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
        named, lost = request.named(keys), request.named(failed)
        is_legal = self._may_settle(request, request.stores, named)
        if is_legal:
            for key, slot in _oldest(request.stores, named):
                if key not in lost:
                    self.manager.slots[slot][:] = pattern(key, CHUNK_BYTES)
        with self._legal_if(is_legal):
            self.manager.complete_store(keys, request.ctx, failed)
            for key, slot in _settle(request.stores, named):
                if key in self.writing and self.slot_of[key] == slot:
                    self.writing.remove(key)
                    if key not in lost:
                        self.resident.add(key)

    @rule(number=requests, failed=few_keys)
    def complete_what_is_open(self, number: int, failed: set[OffloadKey]) -> None:
        """Settle what a request has open, as engines do nearly always."""
        request = self.known[number]
        self.complete_store(number, request.own(key for key, _ in request.stores), failed)
        for load in list(request.loads):
            self.complete_load(number, request.own(load), failed)

    @rule(keys=few_keys, number=requests)
    def delete(self, keys: set[OffloadKey], number: int) -> None:
        """Remove chunks, copied or not."""
        request = self.known[number]
        self.manager.delete(sorted(keys), request.ctx)
        self.writing.difference_update(request.named(keys))

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
        stored = self.note_removals()
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
        for request in self.known:
            expected = [self.expected_state(key) for key in request.named(self.keys)]
            assert list(self.manager.lookup_states(self.keys, request.ctx)) == expected
        stats = self.manager.get_stats()
        assert stats["num_resident"] == len(self.resident)
        if stats["num_protected"]:  # it keeps slots of what was deleted
            assert stats["num_free"] <= self._num_free()
        else:
            assert stats["num_free"] == self._num_free()
        assert stats["num_writing"] == sum(len(request.stores) for request in self.known)
        assert stats["num_requests"] == sum(request.is_known for request in self.known)
        assert self.manager.has_pending_work() == bool(list(self.copies()))

    def _legal_if(self, is_legal: bool) -> AbstractContextManager[object]:  # noqa: FBT001
        return nullcontext() if is_legal else pytest.raises(ContractError)

    @staticmethod
    def _may_settle(
        request: ModelRequest, copies: Collection[Copy], keys: Iterable[OffloadKey]
    ) -> bool:
        return not request.is_live or {key for key, _ in copies}.issuperset(keys)

    def copies(self) -> Iterable[Copy]:
        """Return every copy that is open, in or out."""
        for request in self.known:
            yield from request.loading()
            yield from request.stores

    def _num_free(self) -> int:
        used = {self.slot_of[key] for key in self.resident} | {slot for _, slot in self.copies()}
        return self.num_slots - len(used)

    def expected_state(self, key: OffloadKey) -> LookupResult:
        """Return what a query has to say of a chunk, by its name in events."""
        if key in self.resident:
            return LookupResult.HIT
        return LookupResult.HIT_PENDING if key in self.writing else LookupResult.MISS

    def note_removals(self) -> set[OffloadKey]:
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
