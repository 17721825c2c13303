"""Play the engine towards a manager: write bytes that follow from the key, and verify them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvstrata.core.keys import OffloadKey
from kvstrata.core.manager import NO_KEYS, OffloadingManager
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.testing.chunks import pattern
from kvstrata.testing.tier_calls import NUM_POLLS_MAX, pause


def start(manager: OffloadingManager, req_id: str, **hints: Any) -> ReqContext:  # noqa: ANN401
    """Start a request with these hints."""
    params: Mapping[str, Any] | None = {"kvstrata": hints} if hints else None
    ctx = ReqContext(req_id, params)
    manager.on_new_request(ctx)
    return ctx


def end_step(
    manager: OffloadingManager, new: Collection[str] = (), preempted: Collection[str] = ()
) -> None:
    """Close a step, and let the manager check itself where it can."""
    manager.on_schedule_end(ScheduleEndContext(new, preempted))
    check(manager)


def check(manager: OffloadingManager) -> None:
    """Assert the manager's own invariants, where it offers that."""
    own_check = getattr(manager, "check", None)
    if own_check is not None:
        own_check()


def fill_slots(
    manager: OffloadingManager, keys: Sequence[OffloadKey], slots: Sequence[int]
) -> None:
    """Write each key's bytes into its slot."""
    assert len(keys) == len(slots)
    for key, slot in zip(keys, slots, strict=True):
        manager.slots[slot][:] = pattern(key, manager.slots.chunk_bytes)


def begin_store(
    manager: OffloadingManager, keys: Sequence[OffloadKey], ctx: ReqContext
) -> list[OffloadKey]:
    """Offer chunks and write the bytes of those that were taken; return these."""
    output = manager.prepare_store(keys, ctx)
    if output is None:
        return []
    fill_slots(manager, output.keys_to_store, output.store_spec.slots)
    return list(output.keys_to_store)


def store(
    manager: OffloadingManager,
    keys: Sequence[OffloadKey],
    ctx: ReqContext,
    failed: Collection[OffloadKey] = NO_KEYS,
) -> list[OffloadKey]:
    """Use and store chunks; return those that were taken, failed ones included."""
    manager.touch(keys, ctx)
    taken = begin_store(manager, keys, ctx)
    if taken:
        manager.complete_store(taken, ctx, failed=set(failed) & set(taken))
    return taken


def look_up(manager: OffloadingManager, keys: Sequence[OffloadKey], ctx: ReqContext) -> int:
    """Ask step by step until the answer is a number."""
    for _ in range(NUM_POLLS_MAX):
        count = manager.lookup(keys, ctx)
        if count is not None:
            return count
        end_step(manager)
        pause()
    raise AssertionError("the manager never found out")


def verify(manager: OffloadingManager, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
    """Assert that each slot holds its key's bytes."""
    assert len(keys) == len(slots)
    for key, slot in zip(keys, slots, strict=True):
        expected = pattern(key, manager.slots.chunk_bytes)
        assert manager.slots[slot] == expected, f"slot {slot} does not hold {key!r}"


def load(manager: OffloadingManager, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
    """Load chunks and verify their bytes."""
    spec = manager.prepare_load(keys, ctx)
    verify(manager, keys, spec.slots)
    manager.complete_load(keys, ctx)


def finish(manager: OffloadingManager, ctx: ReqContext) -> None:
    """End a request and the step."""
    manager.on_request_finished(ctx)
    end_step(manager)
