"""`kvstrata check` prints what settings come to, tries tiers, and ends with 1 where one fails."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstrata.cli.main import app
from kvstrata.core.memory import SlotView
from kvstrata.testing import EVERY_KEY, FakeBackend, FakeTier


class LossyTier(FakeTier):
    """A tier that fails every store."""

    def __init__(self, slots: SlotView, **more: Any) -> None:  # noqa: ANN401
        super().__init__(slots, **more | {"backend": FakeBackend(fail_stores=EVERY_KEY)})


@pytest.fixture(autouse=True)
def huge_page_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "transparent_hugepage"
    folder.mkdir()
    (folder / "shmem_enabled").write_text("always within_size advise [never] deny force")
    monkeypatch.setattr("kvstrata.primary.region.HUGE_PAGE_SETTINGS", folder)
    return folder


def write_settings(tmp_path: Path, tier: str, huge_pages: str = "true") -> Path:
    path = tmp_path / "settings.toml"
    path.write_text(
        f"chunk_bytes = 8192\n[primary]\nnum_chunks = 8\nhuge_pages = {huge_pages}\n"
        f'[[tiers]]\nname = "below"\n{tier}\n'
    )
    return path


def test_a_good_file_shows_the_plan_and_tries_the_tiers(tmp_path: Path) -> None:
    tier = f'type = "fs"\nroot = "{tmp_path / "kv"}"\nmax_bytes = "1MiB"'
    found = CliRunner().invoke(app, ["check", str(write_settings(tmp_path, tier))])
    assert found.exit_code == 0
    assert "resolved plan" in found.output
    assert "below: every byte came back" in found.output
    found = CliRunner().invoke(app, ["check", str(tmp_path / "settings.toml"), "--json"])
    shown = json.loads(found.output)
    assert [each["name"] for each in shown["plan"]] == ["primary", "below"]
    assert shown["plan"][0]["rank_bytes"] == 8 * 8192
    assert [(each["name"], each["problem"]) for each in shown["tiers"]] == [("below", None)]


def test_a_tier_that_fails_ends_with_1_and_only_the_plan_tries_nothing(tmp_path: Path) -> None:
    path = write_settings(tmp_path, f'type = "{__name__}:LossyTier"')
    found = CliRunner().invoke(app, ["check", str(path)])
    assert found.exit_code == 1
    assert "below: only 0 of 4 chunks came back" in " ".join(found.output.split())
    assert CliRunner().invoke(app, ["check", str(path), "--plan-only"]).exit_code == 0


def test_what_forbids_huge_pages_is_shown_where_they_are_asked_for(
    tmp_path: Path, huge_page_settings: Path
) -> None:
    def shown(huge_pages: str) -> tuple[str, str]:
        path = write_settings(tmp_path, 'type = "memory"\nmax_bytes = "1MiB"', huge_pages)
        command = ["check", str(path), "--plan-only"]
        text = CliRunner().invoke(app, command).output
        found = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
        return text, found["huge_pages"]

    text, word = shown("true")
    assert str(huge_page_settings / "shmem_enabled") in word
    assert word in text
    assert shown("false")[1] == "not asked for"
    (huge_page_settings / "shmem_enabled").write_text("always within_size [advise] never")
    text, word = shown("true")
    assert word == "allowed"
    assert "huge pages" not in text


def test_a_tier_that_only_reads_is_started_and_said_to_take_no_stores(tmp_path: Path) -> None:
    path = write_settings(tmp_path, 'type = "p2p"\nlisten = "127.0.0.1:0"')
    found = CliRunner().invoke(app, ["check", str(path)])
    assert found.exit_code == 0
    assert "below: started; it takes no stores" in found.output
