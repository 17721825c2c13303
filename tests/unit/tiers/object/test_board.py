import pytest

pytest.importorskip("obstore")

from kvstrata.core.settings import parse_settings
from kvstrata.core.tier import DEFAULT_ENV
from kvstrata.testing import FakeRegion
from kvstrata.tiers.object.board import Board
from kvstrata.tiers.object.client import ObjectClient
from kvstrata.tiers.object.settings import ObjectSettings


def test_pauses_double_up_to_a_limit_and_no_two_hosts_come_back_at_one_time() -> None:
    raw = {"url": "memory://", "backoff_s": 0.1, "backoff_s_max": 0.5}
    settings = parse_settings(ObjectSettings, raw, "tier")
    board = Board(
        FakeRegion(1, 10), DEFAULT_ENV, settings, ObjectClient(settings, "object", "tier")
    )
    for num_tries, most_s in ((1, 0.1), (2, 0.2), (3, 0.4), (4, 0.5), (10_000, 0.5)):
        pauses_s = [board.backoff_s(num_tries) for _ in range(50)]
        assert most_s / 2 <= min(pauses_s) <= max(pauses_s) <= most_s
        assert len(set(pauses_s)) > 25
