"""The scheduler side, driven by the toy engine: real blocks, real slots, real copies."""

from collections.abc import Sequence

import pytest
from typing_extensions import override

from kvstrata.connector import GroupKind, KVGroup, OffloadingConnectorScheduler
from kvstrata.core.errors import ContractError
from kvstrata.core.keys import OffloadKey
from kvstrata.core.request import ReqContext
from kvstrata.core.results import LookupResult
from kvstrata.primary.manager import CPUOffloadingManager
from tests.toy_engine import (
    POISON,
    Status,
    ToyEngine,
    ToyRequest,
    ToySettings,
    ToyStep,
    make_primary,
)

FOUR_PER_CHUNK = (KVGroup(4, 4),)


def warm(settings: ToySettings, *prompts: Sequence[int], num_new_tokens: int = 1) -> ToyEngine:
    """An engine that has computed these prompts and holds no block of them any more."""
    engine = ToyEngine(settings)
    for i, prompt in enumerate(prompts):
        engine.add(f"warm{i}", list(prompt), num_new_tokens)
    engine.finish()
    return engine


def until(engine: ToyEngine, request: ToyRequest, status: Status, num_steps_max: int = 50) -> None:
    for _ in range(num_steps_max):
        if request.status is status:
            return
        engine.step()
    raise AssertionError(f"{request.req_id} is {request.status} after {num_steps_max} steps")


# -- how much is found


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_prompts_around_a_multiple_of_the_chunk_hit_all_they_can(extra: int) -> None:
    # A08. A full hit leaves one token to compute.
    engine = ToyEngine(ToySettings(num_blocks=150, num_slots=140, tokens_per_step=999))
    for num_chunks in range(1, 131):
        prompt = [1000 + num_chunks, *range(num_chunks * 4 + extra - 1)]
        engine.add(f"first{num_chunks}", prompt)
        engine.run()
        again = engine.add(f"again{num_chunks}", prompt)
        match = engine.connector.get_num_new_matched_tokens(again, 0)
        assert match.num_tokens == min(len(prompt) // 4 * 4, len(prompt) - 1)
        engine.run()  # every loaded token is compared
        assert again.num_tokens_computed == max(1, len(prompt) % 4)
    engine.finish()


def test_only_blocks_behind_the_engines_own_are_loaded() -> None:
    # A09: 14 blocks are local, the store holds 15 and a part of the next chunk.
    engine = warm(ToySettings(FOUR_PER_CHUNK), range(64), num_new_tokens=1)
    request = engine.add("again", range(64))
    connector = engine.connector
    assert connector.get_num_new_matched_tokens(request, 14 * 4).num_tokens == 7
    table = list(range(20, 36))
    connector.update_state_after_alloc(request, [table], 7)
    engine.waiting.clear()
    message = connector.build_connector_meta(ToyStep({}, 1))
    before = [layer.copy() for layer in engine.tensors[0][0]]
    engine.workers[0].start_loads(message)
    engine.transfers[0].run_all()
    (copies,) = message.loads[0].copies
    assert copies.block_ids == [34, 35]
    assert copies.parts == [2, 3]
    for layer, old in zip(engine.tensors[0][0], before, strict=True):
        assert (layer[:34] == old[:34]).all()
        assert (layer[34:36] != POISON).all()
    connector.update_connector_output([engine.workers[0].take_output()])
    connector.request_finished(request, [table])


def test_chunks_of_several_blocks_count_in_whole_chunks() -> None:
    # I09: 10 blocks are 2 chunks of 4 and a rest; a prompt that shares 5 blocks hits 4.
    engine = warm(ToySettings(FOUR_PER_CHUNK), range(40), num_new_tokens=1)
    stats = engine.manager.get_stats()
    assert stats["stored_chunks"] == 2
    same = engine.add("same", range(40))
    assert engine.connector.get_num_new_matched_tokens(same, 0).num_tokens == 32
    part = engine.add("part", [*range(20), *range(90, 110)])
    assert engine.connector.get_num_new_matched_tokens(part, 0).num_tokens == 16
    engine.finish()


def test_a_prompt_that_shares_the_start_of_a_large_block_reuses_nothing_of_it() -> None:
    # I07, with and without kept tails.
    for match_tokens in (None, 4):
        settings = ToySettings((KVGroup(32),), match_tokens=match_tokens)
        engine = warm(settings, range(32))
        other = engine.add("other", [*range(8), *range(90, 130)])
        assert engine.connector.get_num_new_matched_tokens(other, 0).num_tokens == 0
        engine.finish()


def test_the_tail_of_a_large_block_is_kept_when_asked_for() -> None:
    # I06: blocks of 32, units of 4, a prompt of 50 tokens: 48 are found.
    settings = ToySettings((KVGroup(32),), match_tokens=4)
    engine = warm(settings, range(50), num_new_tokens=1)
    again = engine.add("again", range(50), num_new_tokens=20)
    assert engine.connector.get_num_new_matched_tokens(again, 0).num_tokens == 48
    engine.finish()  # it writes on in the block that was loaded
    third = engine.add("third", range(50))
    assert engine.connector.get_num_new_matched_tokens(third, 0).num_tokens == 48
    longer = engine.add("longer", [*range(46), 99, 98, 97])
    assert engine.connector.get_num_new_matched_tokens(longer, 0).num_tokens == 32
    engine.finish()
    assert third.num_tokens_computed == 2


def test_the_tail_is_not_kept_unless_asked_for() -> None:
    engine = warm(ToySettings((KVGroup(32),)), range(50))
    again = engine.add("again", range(50))
    assert engine.connector.get_num_new_matched_tokens(again, 0).num_tokens == 32
    engine.finish()


def test_a_group_whose_state_cannot_be_offloaded_turns_all_hits_off() -> None:
    # I10: with a reason, and nothing is written that could never be read.
    settings = ToySettings((KVGroup(4), KVGroup(4, 1, GroupKind.REQUIRED)))
    engine = warm(settings, range(40))
    assert "groups[1]" in str(engine.connector.off_reason)
    again = engine.add("again", range(40))
    assert engine.connector.get_num_new_matched_tokens(again, 0).num_tokens == 0
    engine.finish()
    assert engine.manager.get_stats()["stored_chunks"] == 0


def test_a_group_that_is_not_needed_is_left_out() -> None:
    settings = ToySettings((KVGroup(4), KVGroup(7, 1, GroupKind.IGNORED)))
    engine = warm(settings, range(40))
    assert engine.manager.get_stats()["stored_chunks"] == 10


# -- loads


def test_a_full_hit_loads_before_the_request_is_released() -> None:
    # A15: nothing is scheduled in the step of the load, and the load is issued all the same.
    engine = warm(ToySettings(), range(40))
    request = engine.add("again", range(40))
    engine.step()
    message = engine.messages[-1]
    assert [job.req_id for job in message.loads] == ["again"]
    engine.step()
    assert (request.status, engine.outcomes) == (Status.LOADING, [])
    engine.transfers[0].run_all()
    engine.step()
    assert request.status == Status.LOADED
    assert request.num_computed_tokens == 39
    engine.finish()
    assert request.num_tokens_computed == 1


@pytest.mark.parametrize(("groups", "num_valid"), [((KVGroup(4),), 12), ((KVGroup(4, 2),), 8)])
def test_a_failed_load_keeps_the_valid_prefix(groups: tuple[KVGroup], num_valid: int) -> None:
    # A14: 6 blocks are promised, block 3 fails; the engine compares every byte it reads.
    engine = warm(ToySettings(groups), range(26))
    request = engine.add("again", range(26), 5)
    engine.copiers[0].fail_load_of = {num_valid // groups[0].tokens_per_chunk}
    until(engine, request, Status.LOADING)
    engine.transfers[0].run_all()
    engine.collect()
    (outcome,) = engine.outcomes
    assert outcome.num_computed_tokens == num_valid
    assert outcome.num_failed_tokens == 24 - num_valid
    engine.finish()
    assert request.num_tokens_computed == 26 - num_valid + 4


def test_a_failed_load_is_valid_up_to_a_common_block_of_all_groups() -> None:
    engine = warm(ToySettings((KVGroup(4), KVGroup(16))), range(66))
    request = engine.add("again", range(66))
    # Slots are numbered group by group: the 7th chunk of the small blocks ends at 28 tokens.
    engine.copiers[0].fail_load_of = {6}
    until(engine, request, Status.LOADING)
    engine.transfers[0].run_all()
    engine.collect()
    assert engine.outcomes[0].num_computed_tokens == 16
    engine.finish()


def test_a_failed_load_is_not_tried_again() -> None:
    engine = warm(ToySettings(), range(26))
    request = engine.add("again", range(26))
    engine.copiers[0].fail_load_of = {0}
    until(engine, request, Status.LOADING)
    engine.finish()
    assert sum(len(message.loads) for message in engine.messages) == 1
    assert request.num_tokens_computed == 26


def test_a_chunk_that_expires_between_answer_and_allocation_fails_alone() -> None:
    engine = warm(ToySettings(), range(26))
    request = engine.add("again", range(26))
    connector = engine.connector
    assert connector.get_num_new_matched_tokens(request, 0).num_tokens == 24
    manager = engine.manager
    manager.delete([engine.key(request, 0, 4)], ReqContext("operator"))
    connector.update_state_after_alloc(request, [list(range(1, 7))], 24)
    engine.waiting.clear()
    message = connector.build_connector_meta(ToyStep({}, 1))
    engine.workers[0].start_loads(message)
    engine.transfers[0].run_all()
    (outcome,) = connector.update_connector_output([engine.workers[0].take_output()])
    assert outcome.num_computed_tokens == 16
    assert outcome.num_failed_tokens == 8
    connector.request_finished(request, [[]])


def test_an_answer_that_was_thrown_away_pins_nothing() -> None:
    engine = warm(ToySettings(), range(40))
    request = engine.add("again", range(40))
    for _ in range(10):
        assert engine.connector.get_num_new_matched_tokens(request, 0).num_tokens == 39
    assert engine.manager.get_stats()["num_pinned"] == 0
    engine.abort("again")
    engine.finish()


def test_more_tokens_than_promised_are_refused() -> None:
    engine = warm(ToySettings(), range(40))
    request = engine.add("again", range(40))
    engine.connector.get_num_new_matched_tokens(request, 0)
    with pytest.raises(ContractError, match="last answer was 39"):
        engine.connector.update_state_after_alloc(request, [list(range(1, 11))], 40)
    assert engine.manager.get_stats()["num_pinned"] == 0
    engine.finish()


def test_a_request_that_is_not_known_is_refused() -> None:
    engine = ToyEngine(ToySettings())
    stranger = ToyRequest("stranger", [1], 1, 4)
    with pytest.raises(ContractError, match="stranger"):
        engine.connector.get_num_new_matched_tokens(stranger, 0)


def test_the_first_failed_load_lets_nobody_starve() -> None:
    # The engine keeps a request whose whole load failed at the head of its queue, without blocks.
    engine = warm(ToySettings(num_blocks=30), range(40), range(100, 140))
    engine.copiers[0].fail_load_of = {0}
    first = engine.add("first", range(40))
    until(engine, first, Status.LOADING)
    engine.transfers[0].run_all()
    engine.collect()
    engine.copiers[0].fail_load_of = set()
    second = engine.add("second", range(100, 140))
    engine.waiting.reverse()
    until(engine, second, Status.LOADING)
    engine.waiting.reverse()
    assert engine.connector.get_num_new_matched_tokens(first, 0).num_tokens is None
    third = engine.add("third", range(100, 140))
    assert engine.connector.get_num_new_matched_tokens(third, 0).num_tokens is None
    engine.finish()
    assert first.num_tokens_computed == 40


# -- stores


def test_every_block_is_stored_by_the_end() -> None:
    # B06: chunks come in 4, 4 and 2; the request ends in the step that fills the last block.
    engine = ToyEngine(ToySettings(tokens_per_step=16))
    request = engine.add("r", range(40), 1)
    engine.finish()
    assert [len(m.stores[0].copies[0].slots) for m in engine.messages if m.stores] == [4, 4, 2]
    assert len(engine.resident(request)) == 10


def test_blocks_that_somebody_else_fills_are_not_stored() -> None:
    # A13: blocks 5..7 of 8 are being filled by somebody else.
    engine = ToyEngine(ToySettings())
    request = engine.add("r", range(32), 9)
    connector = engine.connector
    engine.waiting.clear()
    table = list(range(1, 12))
    connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, [table], 0)
    step = ToyStep({"r": [table]}, 1, {"r": 32})
    step.unfilled_block_ids = [[6, 7, 8]]
    (job,) = connector.build_connector_meta(step).stores
    assert job.copies[0].block_ids == [1, 2, 3, 4, 5]
    request.num_computed_tokens = 32
    request.extend([1])
    step = ToyStep({"r": [table]}, 1, {"r": 1})
    step.unfilled_block_ids = [[8]]
    (job,) = connector.build_connector_meta(step).stores
    assert job.copies[0].block_ids == [6, 7]
    # It ends before the fill is confirmed: what is in the block is not known, so it is not stored.
    connector.request_finished(request, [table])
    message = connector.build_connector_meta(ToyStep({}, 1))
    assert message.early_stores == message.stores == []


def test_blocks_are_stored_once_their_fill_is_confirmed() -> None:
    engine = ToyEngine(ToySettings())
    request = engine.add("r", range(32), 9)
    connector = engine.connector
    engine.waiting.clear()
    table = list(range(1, 12))
    connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, [table], 0)
    step = ToyStep({"r": [table]}, 1, {"r": 32})
    step.unfilled_block_ids = [[1]]
    assert connector.build_connector_meta(step).stores == []
    request.num_computed_tokens = 32
    request.extend([1])
    (job,) = connector.build_connector_meta(ToyStep({"r": [table]}, 1, {"r": 1})).stores
    assert job.copies[0].block_ids == table[:8]


def test_nothing_is_stored_beyond_the_hashes_that_are_known() -> None:
    # Tokens may be computed before they are known: drafts, or a step that is still running.
    engine = ToyEngine(ToySettings())
    request = engine.add("r", range(14))
    engine.waiting.clear()
    connector = engine.connector
    connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, [[1, 2, 3, 4, 5]], 0)
    step = ToyStep({"r": [[1, 2, 3, 4, 5]]}, 1, {"r": 20})
    (job,) = connector.build_connector_meta(step).stores
    assert job.copies[0].block_ids == [1, 2, 3]


def test_a_request_that_wants_nothing_stored_stores_nothing() -> None:
    engine = ToyEngine(ToySettings())
    engine.add("r", range(40), store=False)
    engine.finish()
    assert engine.manager.get_stats()["stored_chunks"] == 0


def test_a_full_primary_is_asked_again_only_after_a_copy_has_ended() -> None:
    engine = ToyEngine(ToySettings(num_slots=4))
    engine.add("first", range(16), 9)
    second = engine.add("second", range(100, 116), 9)
    engine.step()
    assert engine.manager.get_stats()["no_room"] == 1
    for _ in range(3):
        engine.step()
    assert engine.manager.get_stats()["offered_chunks"] == 8
    engine.transfers[0].run_all()
    engine.step()  # notices
    engine.step()
    assert engine.manager.get_stats()["offered_chunks"] > 8
    engine.transfers[0].run_all()
    engine.collect()
    assert len(engine.resident(second)) == 4
    engine.finish()


def test_an_abort_before_the_request_ran_leaves_nothing() -> None:
    engine = ToyEngine(ToySettings())
    engine.add("r", range(40))
    engine.abort("r")
    engine.finish()
    assert engine.messages == []
    assert engine.manager.get_stats()["num_requests"] == 0


def test_an_abort_during_a_load_keeps_the_blocks_until_the_load_is_over() -> None:
    engine = warm(ToySettings(), range(40))
    request = engine.add("again", range(40))
    until(engine, request, Status.LOADING)
    engine.abort("again")
    free = len(engine.free)
    engine.step()
    assert len(engine.free) == free
    assert engine.connector.has_pending_work()
    engine.finish()
    assert [outcome.req_id for outcome in engine.outcomes] == ["again"]


def test_a_reset_during_copies_leaves_nothing_visible_and_nothing_pinned() -> None:
    engine = ToyEngine(ToySettings())
    engine.add("r", range(40), 5)
    engine.step()
    engine.connector.reset_cache()
    engine.finish()
    assert engine.finished["r"].status is Status.DONE
    again = engine.add("again", range(36))
    assert engine.connector.get_num_new_matched_tokens(again, 0).num_tokens == 0
    engine.finish()


def test_a_block_whose_hash_came_late_is_stored_at_the_end() -> None:
    # B06: with steps in flight the last token is not known yet when its block is scheduled.
    engine = ToyEngine(ToySettings())
    request = engine.add("r", range(7), 2)
    engine.waiting.clear()
    connector = engine.connector
    connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, [[1, 2]], 0)
    (job,) = connector.build_connector_meta(ToyStep({"r": [[1, 2]]}, 1, {"r": 8})).stores
    assert job.copies[0].block_ids == [1]
    request.num_computed_tokens = 8
    request.extend([5])
    connector.request_finished(request, [[1, 2]])
    assert connector.has_pending_work()
    message = connector.build_connector_meta(ToyStep({}, 1))
    assert [job.copies[0].block_ids for job in message.early_stores] == [[2]]


def test_what_a_load_has_not_brought_yet_is_not_stored_when_the_request_ends() -> None:
    engine = warm(ToySettings(), range(40))
    request = engine.add("again", range(40))
    until(engine, request, Status.LOADING)
    engine.connector.reset_cache()
    request.num_computed_tokens = 39  # as engines count that take the load for granted
    engine.waiting.clear()
    engine.connector.request_finished(request, request.tables)
    assert engine.connector.build_connector_meta(ToyStep({}, 1)).early_stores == []


def test_after_a_failed_load_a_window_is_valid_only_where_the_engine_was() -> None:
    groups = (KVGroup(4), KVGroup(4, 1, GroupKind.WINDOW, 8))
    engine = warm(ToySettings(groups), range(26))
    request = engine.add("again", range(26))
    engine.copiers[0].fail_load_of = {5}
    until(engine, request, Status.LOADING)
    engine.transfers[0].run_all()
    engine.collect()
    assert engine.outcomes[0].num_computed_tokens == 0
    engine.finish()


# -- the fence


def preempted_in_a_store(*, with_fence: bool) -> tuple[ToyEngine, ToyRequest, ToyRequest]:
    """Two requests that do not fit together; no store runs before somebody waits for it."""
    settings = ToySettings(num_blocks=17, with_fence=with_fence, knows_capacity=True)
    engine = ToyEngine(settings)
    first = engine.add("first", range(28), 9)
    second = engine.add("second", range(100, 128), 9)
    while engine.num_preemptions == 0:
        engine.step()
    return engine, first, second


def test_blocks_of_a_preempted_request_are_overwritten_only_after_its_stores() -> None:
    # B01, by content.
    engine, _first, second = preempted_in_a_store(with_fence=True)
    message = engine.messages[-1]
    assert second.num_computed_tokens == 0
    assert message.flush_job_ids
    assert engine.transfers[0].num_awaited == len(message.flush_job_ids)
    engine.finish()  # compares all that is stored with what belongs there
    assert second.req_id in engine.finished


def test_without_the_fence_foreign_bytes_are_stored() -> None:
    engine, _, _ = preempted_in_a_store(with_fence=False)
    with pytest.raises(AssertionError, match="wrong bytes"):
        engine.finish()


def test_a_preempted_request_loads_what_it_had_computed() -> None:
    engine, _, second = preempted_in_a_store(with_fence=True)
    num_computed = second.num_tokens_computed
    engine.finish()
    (record,) = (r for r in engine.connector.take_request_records() if r.req_id == "second")
    assert record.num_preemptions == 1
    assert record.resumed_tokens == num_computed // 4 * 4
    assert (
        second.num_tokens_computed == num_computed + second.num_wanted - 1 - num_computed // 4 * 4
    )


def test_a_preempted_request_is_asked_about_before_its_store_has_ended() -> None:
    # B02: no error; a shorter hit, or the load once the store is done.
    engine = ToyEngine(ToySettings(num_blocks=60))
    request = engine.add("r", range(28), 9)
    engine.step()
    engine.running.remove(request)
    engine._preempt(request)
    engine.waiting.clear()
    engine.step()
    assert engine.transfers[0].queued
    assert engine.connector.get_num_new_matched_tokens(request, 0).num_tokens is None
    engine.transfers[0].run_all()
    engine.collect()
    assert engine.connector.get_num_new_matched_tokens(request, 0).num_tokens == 28
    engine.waiting.append(request)
    engine.finish()


@pytest.mark.parametrize("through", ["allocation", "step output"])
def test_a_block_given_away_without_loaded_tokens_is_fenced(through: str) -> None:
    # B05: a copy uses block 7, and the engine says that it belongs to somebody else now.
    engine = ToyEngine(ToySettings())
    connector = engine.connector
    one, other = engine.add("one", range(8)), engine.add("other", range(100, 108))
    engine.waiting.clear()
    connector.get_num_new_matched_tokens(one, 0)
    connector.update_state_after_alloc(one, [[7, 8]], 0)
    (job,) = connector.build_connector_meta(ToyStep({"one": [[7, 8]]}, 1, {"one": 8})).stores
    connector.request_finished(one, [[7, 8]])
    step = ToyStep({}, 1)
    if through == "allocation":
        connector.get_num_new_matched_tokens(other, 0)
        connector.update_state_after_alloc(other, [[3, 7]], 0)
    else:
        step.new_block_ids = [[7]]
    assert connector.build_connector_meta(step).flush_job_ids == [job.job_id]
    assert connector.build_connector_meta(ToyStep({}, 1)).flush_job_ids == []


def test_a_shared_block_of_the_engines_own_cache_is_not_fenced() -> None:
    engine = ToyEngine(ToySettings(with_local_cache=True))
    engine.add("one", range(16), 3)
    engine.step()
    engine.add("other", range(16), 3)
    engine.step()
    assert engine.messages[-1].flush_job_ids == []
    assert engine.transfers[0].queued
    engine.finish()


def test_withheld_chunks_of_a_preempted_request_are_stored_before_its_blocks_go() -> None:
    settings = ToySettings(num_blocks=17, knows_capacity=True, store_threshold=2)
    engine = ToyEngine(settings)
    engine.add("first", range(28), 9)
    second = engine.add("second", range(100, 128), 9)
    while engine.num_preemptions == 0:
        engine.step()
    message = engine.messages[-1]
    (early,) = message.early_stores
    assert early.req_id == "second"
    assert early.job_id in message.flush_job_ids
    num_computed = second.num_tokens_computed
    engine.finish()
    (record,) = (r for r in engine.connector.take_request_records() if r.req_id == "second")
    assert record.resumed_tokens == num_computed // 4 * 4


def test_blocks_that_a_window_left_behind_are_not_offered_again() -> None:
    # They were given to others in an earlier step; only what the request still has is stored.
    settings = ToySettings((KVGroup(4, 1, GroupKind.WINDOW, 5),), store_threshold=2)
    engine = ToyEngine(settings)
    request = engine.add("r", range(16), 3)
    engine.waiting.clear()
    connector = engine.connector
    connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, [[1, 2, 3, 4]], 0)
    connector.build_connector_meta(ToyStep({"r": [[1, 2, 3, 4]]}, 1, {"r": 16}))
    request.num_computed_tokens = 16
    request.extend([1])
    step = ToyStep({"r": [[0, 0, 0, 4, 5]]}, 1, {"r": 1})
    connector.build_connector_meta(step)
    request.num_computed_tokens = 0
    message = connector.build_connector_meta(ToyStep({}, 1, preempted_req_ids=["r"]))
    assert [job.copies[0].block_ids for job in message.early_stores] == [[4]]
    connector.request_finished(request, [[]])


def test_blocks_given_anew_after_a_failed_load_are_fenced() -> None:
    engine = warm(ToySettings(), range(40))
    other = engine.add("other", range(100, 108))
    request = engine.add("again", range(40))
    engine.waiting.clear()
    connector = engine.connector
    connector.get_num_new_matched_tokens(other, 0)
    connector.update_state_after_alloc(other, [[20, 21]], 0)
    (job,) = connector.build_connector_meta(ToyStep({"other": [[20, 21]]}, 1, {"other": 8})).stores
    connector.request_finished(other, [[20, 21]])
    engine.copiers[0].fail_load_of = {0}
    connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, [list(range(1, 11))], 39)
    engine.workers[0].start_loads(connector.build_connector_meta(ToyStep({}, 1)))
    engine.transfers[0].run_all()
    connector.update_connector_output([engine.workers[0].take_output()])
    assert connector.get_num_new_matched_tokens(request, 0).num_tokens == 0
    connector.update_state_after_alloc(request, [list(range(12, 22))], 0)
    assert connector.build_connector_meta(ToyStep({}, 1)).flush_job_ids == [job.job_id]


def test_a_request_cannot_be_scheduled_and_preempted_in_one_step() -> None:
    engine = ToyEngine(ToySettings())
    engine.add("r", range(8))
    step = ToyStep({}, 1, {"r": 1}, preempted_req_ids=["r"])
    with pytest.raises(ContractError, match="same step"):
        engine.connector.build_connector_meta(step)


# -- records


def test_the_record_of_each_request_adds_up() -> None:
    # K05.
    engine = ToyEngine(ToySettings(num_slots=20, with_local_cache=True, num_blocks=40))
    for i in range(10):
        engine.add(f"r{i}", [*range(20), *range(100 * i, 100 * i + 13 + i)], 4)
        engine.run()
    records = engine.connector.take_request_records()
    assert len(records) == 10
    for i, record in enumerate(records):
        served = sum(record.tokens_by_medium.values())
        assert record.queried_tokens == 20 + 13 + i
        assert record.queried_tokens == record.engine_tokens + served + record.missed_tokens
    stats = engine.connector.get_stats()
    parts = ("engine_tokens", "primary_tokens", "tier_tokens", "missed_tokens")
    assert stats["queried_tokens"] == sum(stats[name] for name in parts) == 375
    assert stats["engine_tokens"] > 0
    engine.finish()


class TieredManager(CPUOffloadingManager):
    """A primary that says which of its chunks came from a tier below."""

    @override
    def media_of(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> Sequence[str]:
        return ["cpu"] * 2 + ["fs"] * (len(keys) - 2)


def test_the_record_says_which_tier_served_what_and_how_long_it_took() -> None:
    # K07: 2 chunks from the primary, 3 from fs, 1 missed.
    engine = ToyEngine(ToySettings(), make_primary(TieredManager, 64, 64))
    engine.add("warm", range(20))
    engine.finish()
    engine.connector.take_request_records()
    request = engine.add("r", range(24))
    until(engine, request, Status.LOADING)
    assert engine.connector.served_tokens(request) == {"cpu": 8, "fs": 12}
    engine.finish()
    (record,) = engine.connector.take_request_records()
    assert record.tokens_by_medium == {"cpu": 8, "fs": 12}
    assert record.missed_tokens == 4
    assert record.load_s > 0
    assert engine.connector.get_stats().tiers["fs"]["served_tokens"] == 12


def test_what_failed_to_load_counts_as_missed() -> None:
    engine = warm(ToySettings(), range(26))
    engine.connector.take_request_records()
    request = engine.add("again", range(26))
    engine.copiers[0].fail_load_of = {2}
    until(engine, request, Status.LOADING)
    engine.finish()
    (record,) = engine.connector.take_request_records()
    assert record.tokens_by_medium == {"cpu": 8}
    assert record.missed_tokens == 18


# -- several ranks


def test_one_copy_is_kept_of_what_all_ranks_hold_alike() -> None:
    # I08: 4 ranks, one copy written, all of them load it, 4 times the tokens in the same bytes.
    apart = ToyEngine(ToySettings(num_ranks=4))
    alike = ToyEngine(ToySettings(num_ranks=4, is_replicated=True))
    assert apart.manager.slots.chunk_bytes == 4 * alike.manager.slots.chunk_bytes
    alike.add("r", range(40))
    alike.finish()
    assert sum(copier.num_stored_blocks for copier in alike.copiers) == 10
    again = alike.add("again", range(40))
    alike.finish()
    assert [copier.num_loaded_blocks for copier in alike.copiers] == [10] * 4
    assert again.num_tokens_computed == 1


def test_a_chunk_is_visible_only_once_every_rank_has_stored_it() -> None:
    engine = ToyEngine(ToySettings(num_ranks=2))
    request = engine.add("r", range(8), 9)
    engine.step()
    engine.transfers[0].run_all()
    engine.collect()
    states = engine.manager.lookup_states([engine.key(request, 0, 0)], ReqContext("x"))
    assert states == [LookupResult.HIT_PENDING]
    engine.transfers[1].run_all()
    engine.collect()
    states = engine.manager.lookup_states([engine.key(request, 0, 0)], ReqContext("x"))
    assert states == [LookupResult.HIT]
    engine.finish()


def test_ranks_that_differ_agree_on_the_shortest_prefix() -> None:
    # C09: of 5 chunks the ranks load 5, 5, 3 and 5.
    engine = warm(ToySettings(num_ranks=4), range(21))
    request = engine.add("again", range(21))
    engine.copiers[2].fail_load_of = {3, 4}
    until(engine, request, Status.LOADING)
    for rank in (2, 0, 3, 1):
        assert engine.outcomes == []
        engine.transfers[rank].run_all()
        engine.collect()
    (outcome,) = engine.outcomes
    assert outcome.num_computed_tokens == 12
    assert engine.manager.get_stats()["num_pinned"] == 0
    engine.finish()


def test_the_connector_is_the_managers_only_owner() -> None:
    engine = ToyEngine(ToySettings())
    assert isinstance(engine.connector, OffloadingConnectorScheduler)
    engine.connector.shutdown()
    assert engine.connector.shutdown() == engine.manager.shutdown()
