import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstrata.cli import demo
from kvstrata.cli.demo_report import is_identical, make_html, rounds, summary, write_files
from kvstrata.cli.demo_run import DemoModel, DemoPlan, DemoResult, run_demo, tiny_model
from kvstrata.cli.main import app
from kvstrata.engine.demo_workload import TurnCost, open_conversations


def make_plan(root: Path) -> DemoPlan:
    return DemoPlan(
        num_conversations=3,
        num_document_tokens=400,
        num_turns=2,
        num_late_turns=1,
        num_answer_tokens=6,
        share_of_engine=0.4,
        root=root,
    )


def make_cost(
    turn: int, ttft_s: float, answer: tuple[int, ...] = (1, 2), **tokens: int
) -> TurnCost:
    return TurnCost("text", turn, answer, 100, ttft_s, ttft_s, tokens)


def make_result(root: Path) -> DemoResult:
    result = DemoResult("tiny", make_plan(root))
    result.computed = [make_cost(turn, 4.0, engine=0, computed=100) for turn in range(3)]
    result.offloaded = [
        make_cost(0, 5.0, engine=0, computed=100),
        make_cost(1, 0.2, engine=10, primary=80, computed=10),
    ]
    result.late = [make_cost(2, 0.5, engine=0, fs=90, computed=10)]
    result.moved_bytes = {"primary_stored": 100, "fs_loaded": 90}
    return result


def test_summary_has_medians_over_returning_turns_and_sums_of_tokens(tmp_path: Path) -> None:
    assert summary(make_result(tmp_path)) == {
        "identical": True,
        "ttft_compute_s": 4.0,
        "ttft_primary_s": 0.2,
        "ttft_fs_s": 0.5,
        "tokens": {"engine": 10, "primary": 80, "fs": 90, "computed": 120},
        "bytes": {"primary_stored": 100, "fs_loaded": 90},
        "model": "tiny",
    }


def test_one_other_token_is_not_identical(tmp_path: Path) -> None:
    result = make_result(tmp_path)
    result.late = [make_cost(2, 0.5, (1, 3), fs=90)]
    assert not is_identical(result)
    assert "NOT every token" in make_html(result, None)


def test_a_missing_turn_is_not_identical(tmp_path: Path) -> None:
    result = make_result(tmp_path)
    result.late = []
    assert not is_identical(result)


def test_rounds_say_which_turns_were_in_the_second_process(tmp_path: Path) -> None:
    found = rounds(make_result(tmp_path))
    assert [row.title for row in found] == ["1", "2", "3, process 2"]
    assert [row.ttft_compute_s / row.ttft_offload_s for row in found] == [0.8, 20.0, 8.0]


@pytest.mark.slow  # it draws
def test_the_page_needs_no_other_file(tmp_path: Path) -> None:
    page = next(p for p in write_files(make_result(tmp_path), tmp_path) if p.suffix == ".html")
    text = page.read_text(encoding="utf-8")
    assert "20.0x" in text
    assert "http" not in text
    assert "src=" not in text.replace('src="data:', "")


def test_conversations_are_over_different_documents_of_one_length() -> None:
    model = tiny_model()
    conversations = open_conversations(model.chat, 3, 400)
    assert len({c.title for c in conversations}) == 3
    assert len({len(c.tokens) for c in conversations}) == 1


def test_too_many_conversations_are_refused() -> None:
    with pytest.raises(FileNotFoundError, match="too few"):
        open_conversations(tiny_model().chat, 99, 400)


@pytest.mark.slow
def test_each_tier_serves_its_turns_and_every_token_is_the_same(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    *_, (_, _, result) = run_demo(tiny_model(), plan)
    assert is_identical(result)
    assert [len(c) for c in (result.computed, result.offloaded, result.late)] == [9, 6, 3]
    for cost in result.offloaded:
        assert sum(cost.tokens.values()) == cost.num_prompt_tokens
        assert (cost.tokens.get("primary", 0) > 300) == (cost.turn > 0)
    for cost in result.late:
        assert sum(cost.tokens.values()) == cost.num_prompt_tokens
        assert cost.tokens["fs"] > 300
    assert result.moved_bytes["fs_loaded"] > 0


@pytest.mark.slow
def test_the_command_prints_one_json_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_model() -> DemoModel:
        return tiny_model()

    monkeypatch.setattr(demo, "load_model", load_model)
    arguments = ["demo", "--json", "--tokens", "300", "--turns", "2", "--out", str(tmp_path)]
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert found["identical"] is True
    assert found["tokens"]["fs"] > 0
    assert "tiny model" in answer.stderr
    assert (tmp_path / "kvstrata-demo.html").exists()
