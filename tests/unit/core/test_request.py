"""Hints are read once, and a bad one costs nothing but itself."""

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.request import (
    NO_HINTS,
    ReqContext,
    RequestHints,
    RetentionRange,
    SessionHint,
    parse_hints,
)

GOOD: dict[str, tuple[Any, Any]] = {
    "tenant": ("acme", "acme"),
    "priority": (90, 90),
    "ttl_s": (60, 60.0),
    "retention": (
        [{"start": 0, "end": 10, "priority": 80, "ttl_s": 5}, {"start": 10}],
        (RetentionRange(0, 10, 80, 5.0), RetentionRange(10, None, None, None)),
    ),
    "load_tiers": (["fs"], ("fs",)),
    "store_tiers": ([], ()),
    "store": (False, False),
    "max_wait_s": (0.5, 0.5),
    "max_load_tokens": (0, 0),
    "peer": ("host:1", "host:1"),
    "session": ("over", SessionHint.OVER),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_hint_is_read(name: str) -> None:
    raw, expected = GOOD[name]
    hints = ReqContext("r", {"kvstrata": {name: raw}}).hints
    assert hints.problems == ()
    assert getattr(hints, name) == expected
    assert getattr(hints, name) != getattr(NO_HINTS, name)


@pytest.mark.parametrize("name", [*GOOD])
def test_none_leaves_the_default(name: str) -> None:
    assert parse_hints({name: None}) == NO_HINTS


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("tenant", ""),
        ("tenant", 7),
        ("tenant", "x" * 513),
        ("priority", -1),
        ("priority", 101),
        ("priority", True),
        ("priority", "90"),
        ("priority", 50.0),
        ("ttl_s", -1),
        ("ttl_s", float("nan")),
        ("ttl_s", float("inf")),
        ("ttl_s", True),
        ("ttl_s", "60"),
        ("retention", {"start": 0}),
        ("retention", "all"),
        ("retention", [{"from": 0}]),
        ("retention", [{"start": 5, "end": 5}]),
        ("retention", [{"start": -1}]),
        ("retention", [{"priority": 101}]),
        ("load_tiers", "fs"),
        ("load_tiers", {"fs": 1}),
        ("load_tiers", [1]),
        ("store", "no"),
        ("store", 0),
        ("max_wait_s", -0.1),
        ("max_load_tokens", -1),
        ("max_load_tokens", 1.5),
        ("peer", []),
        ("session", "maybe"),
        ("session", ["over"]),
    ],
)
def test_a_bad_hint_is_reported_and_the_others_count(name: str, raw: object) -> None:
    other = "priority" if name != "priority" else "ttl_s"
    hints = parse_hints({name: raw, other: 7})
    assert len(hints.problems) == 1
    assert name in hints.problems[0]
    assert getattr(hints, name) == getattr(NO_HINTS, name)
    assert getattr(hints, other) == 7


def test_an_unknown_hint_is_warned_of_with_the_nearest_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        ctx = ReqContext("r7", {"kvstrata": {"priorty": 90, "ttl_s": 60}})
    assert ctx.hints.priority == 50
    assert ctx.hints.ttl_s == 60.0
    assert "r7" in caplog.text
    assert "did you mean priority?" in caplog.text


@pytest.mark.parametrize("raw", ["high", 7, ["priority"], None])
def test_hints_that_are_no_mapping_are_ignored(raw: object) -> None:
    hints = ReqContext("r", {"kvstrata": raw}).hints
    assert len(hints.problems) == 1
    assert parse_hints({}) == NO_HINTS


@given(
    st.dictionaries(
        st.sampled_from([*GOOD, "x", 3]),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=5,
        ),
    )
)
def test_no_hint_whatever_raises(raw: object) -> None:
    assert isinstance(parse_hints(raw), RequestHints)


def test_parameters_stay_as_the_engine_gave_them() -> None:
    params = {"kvstrata": {"priority": 1}, "other": object()}
    before = dict(params)
    ctx = ReqContext("r", params)
    assert ctx.kv_transfer_params is params
    assert params == before
    assert ReqContext("r").hints is NO_HINTS
    assert ReqContext("r", {"other": 1}).hints is NO_HINTS


def test_two_contexts_of_one_id_are_different_requests() -> None:
    assert ReqContext("r") != ReqContext("r")
