"""Reading traces: every format, and sessions interleaved."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstrata.core.errors import ConfigError
from kvstrata.core.keys import get_block_hash
from kvstrata.core.namespace import hash_blocks
from kvstrata.replay.trace import Interleaving, Trace, TraceRequest, open_trace


def write(path: Path, rows: Sequence[Any]) -> Path:
    text = "\n".join(json.dumps(row) for row in rows) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def read(trace: Trace) -> list[TraceRequest]:
    return list(trace.requests())


MOONCAKE = [
    {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 1500, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
]


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_block_ids_become_keys_and_milliseconds_seconds(tmp_path: Path, name: str) -> None:
    trace = open_trace(write(tmp_path / name, MOONCAKE))
    first, second = read(trace)
    assert trace.tokens_per_chunk == 512
    assert (first.at_s, first.num_tokens, first.is_partial) == (0.0, 1024, False)
    assert (second.at_s, second.num_tokens, second.is_partial) == (1.5, 1100, True)
    assert second.keys[:2] == first.keys
    assert trace.count_distinct() == 3


def test_keys_are_as_long_as_real_ones_and_new_objects_each_time(tmp_path: Path) -> None:
    trace = open_trace(write(tmp_path / "t.jsonl", MOONCAKE))
    (first, second), (again, _) = read(trace), read(trace)
    assert len(first.keys[0]) == 36
    assert first.keys[0] is not second.keys[0]
    assert first.keys[0] is not again.keys[0]


def test_seconds_and_block_length_of_another_publisher_are_recognised(tmp_path: Path) -> None:
    rows = [
        {"chat_id": 1, "timestamp": 61.25, "input_length": 40, "hash_ids": [7, 8, 9], "turn": 1}
    ]
    trace = open_trace(write(tmp_path / "t.jsonl", rows))
    assert trace.tokens_per_chunk == 16
    assert read(trace)[0].at_s == 61.25


def session(name: str, times: Sequence[float], *, tool_tokens: int = 128) -> list[dict[str, Any]]:
    head = {"session": name, "block_size": 64, "tool_tokens": tool_tokens, "system_tokens": 64}
    requests = [{"t": t, "in": 64 * 8, "h": [[1, 4 + i]]} for i, t in enumerate(times)]
    return [head, *requests]


def test_sessions_start_one_step_apart_and_are_merged_by_time(tmp_path: Path) -> None:
    rows = [*session("a", [0, 30, 100]), *session("b", [0, 5, 200])]
    trace = open_trace(
        write(tmp_path / "t.jsonl", rows), Interleaving(step_s=20, num_requests_min=3)
    )
    assert [request.at_s for request in read(trace)] == [0, 20, 25, 30, 100, 220]


def test_later_requests_and_short_sessions_are_left_out(tmp_path: Path) -> None:
    rows = [*session("a", [0, 30, 100]), *session("short", [0]), *session("b", [0, 5, 200])]
    how = Interleaving(num_sessions=2, step_s=20, horizon_s=50, num_requests_min=2)
    trace = open_trace(write(tmp_path / "t.jsonl", rows), how)
    assert [request.at_s for request in read(trace)] == [0, 20, 25, 30]


def test_sessions_share_tools_and_system_prompt_of_equal_length_only(tmp_path: Path) -> None:
    rows = [*session("a", [0]), *session("b", [0]), *session("c", [0], tool_tokens=64)]
    trace = open_trace(write(tmp_path / "t.jsonl", rows), Interleaving(num_requests_min=1))
    a, b, c = (request.keys for request in read(trace))
    assert [x == y for x, y in zip(a, b, strict=True)] == [True, True, True, False]
    assert not set(a) & set(c)


def test_recorded_blocks_are_grouped_under_the_last_ones_name(tmp_path: Path) -> None:
    rows = session("a", [0, 1])
    fine = read(open_trace(write(tmp_path / "t.jsonl", rows), Interleaving(num_requests_min=1)))
    how = Interleaving(blocks_per_chunk=2, num_requests_min=1)
    trace = open_trace(tmp_path / "t.jsonl", how)
    assert trace.tokens_per_chunk == 128
    coarse = read(trace)
    assert coarse[0].keys == fine[0].keys[1::2]
    assert len(coarse[1].keys) == 2  # five blocks: the last one is alone


def test_token_counts_give_new_chunks_to_every_request(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.4799600,512,8\n"
    )
    first, second = read(open_trace(path))
    assert (len(first.keys), first.is_partial) == (10, True)
    assert (len(second.keys), second.is_partial) == (1, False)
    assert second.at_s - first.at_s == pytest.approx(0.5)
    assert not set(first.keys) & set(second.keys)


def test_prompts_are_hashed_as_the_connector_hashes_them(tmp_path: Path) -> None:
    rows = [{"timestamp": 3, "token_ids": list(range(10))}, {"token_ids": list(range(12))}]
    first, second = read(open_trace(write(tmp_path / "t.jsonl", rows), tokens_per_chunk=4))
    assert [get_block_hash(key) for key in first.keys] == hash_blocks(range(10), 4)
    assert second.keys[:2] == first.keys
    assert (first.at_s, second.at_s) == (3.0, 1.0)


def test_text_counts_four_bytes_a_token_and_tenants_share_nothing(tmp_path: Path) -> None:
    rows = [
        {"prompt": "x" * 64},
        {"messages": [{"role": "user", "content": "y" * 64}]},
        {"prompt": "x" * 64, "tenant": "other"},
    ]
    plain, chat, other = read(open_trace(write(tmp_path / "t.jsonl", rows), tokens_per_chunk=4))
    assert (plain.num_tokens, len(plain.keys)) == (16, 4)
    assert len(chat.keys) == 4
    assert not set(plain.keys) & set(other.keys)


@pytest.mark.parametrize("text", ["", "no json\n", '{"a": 1}\n', "[1]\n"])
def test_an_unknown_format_is_a_config_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="trace"):
        open_trace(path)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read"):
        open_trace(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("second", "third"),
    [
        ('{"timestamp": 1, "hash_ids": [2]}', '{"timestamp": "x", "hash_ids": [3]}'),
        ('{"timestamp": 1, "hash_ids": [2]}', '{"timestamp": 2, "hash_ids": 3}'),
        ('{"timestamp": 1, "hash_ids": [2]}', '{"timestamp": 2, "hash_ids": [3.5]}'),
        ('{"timestamp": 1, "hash_ids": [2]}', '{"timestamp": 2}'),
        ('{"timestamp": 1, "hash_ids": [2]}', '{"hash_ids": [3], "input_length": -1}'),
        ('{"timestamp": 1, "hash_ids": [2]}', "[]"),
        ('{"timestamp": 1, "hash_ids": [2]}', "{"),
    ],
)
def test_a_damaged_line_is_named_by_its_request(tmp_path: Path, second: str, third: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(['{"timestamp": 0, "hash_ids": [1, 2]}', second, third]))
    requests = open_trace(path).requests()
    assert (next(requests).at_s, len(next(requests).keys)) == (0.0, 1)
    with pytest.raises(ConfigError, match=r"^trace: can't read request 3: "):
        next(requests)


@pytest.mark.parametrize("first", ["", "\n", '{"hash_ids": 5}', '{"session": 1}', "[]", "{}"])
def test_a_file_that_begins_oddly_is_refused(tmp_path: Path, first: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(first)
    with pytest.raises(ConfigError, match=r"^trace: "):
        open_trace(path)


def test_a_compressed_trace_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    rows = [f'{{"timestamp": {i}, "hash_ids": [{i * 7919}]}}' for i in range(5_000)]
    whole = gzip.compress("\n".join(rows).encode())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"^trace: can't read request "):
        list(open_trace(path).requests())
