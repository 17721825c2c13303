"""An interpreter that exits while an object tier has copies in flight."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("obstore")

from tests.fault_proxy import FaultProxy
from tests.s3_server import S3Server, SeaweedFs

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
from kvstrata.testing import FakeRegion, numbered_key
from kvstrata.core.results import LoadJob, StoreJob
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.tiers.object.tier import ObjectTier

slots = FakeRegion(16, 1_000_000)
tier = ObjectTier(slots, request_timeout_s={timeout_s}, **{settings!r})
keys = [numbered_key(i) for i in range(16)]
tier.submit_store(StoreJob(1, keys, range(16)))
tier.submit_load(LoadJob(2, keys, range(16)))
tier.lookup_many([numbered_key(100 + i) for i in range(16)], ReqContext("r"))
tier.on_schedule_end(ScheduleEndContext((), ()))
if {shuts_down}:
    tier.shutdown(0.05)
print("exiting", flush=True)
{ending}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with SeaweedFs(tmp_path_factory.mktemp("weed")) as server:
        yield server


def start(
    settings: dict[str, object], ending: str = "", timeout_s: float = 5.0, *, shuts_down: bool
) -> subprocess.Popen[str]:
    script = SCRIPT.format(
        settings=settings, ending=ending, timeout_s=timeout_s, shuts_down=shuts_down
    )
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("shuts_down", [False, True])
def test_exits_cleanly_with_copies_in_flight(server: S3Server, shuts_down: bool) -> None:
    for i in range(5):
        process = start(server.settings(f"exit/{i}"), shuts_down=shuts_down)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (0, "exiting\n", "")


@pytest.mark.parametrize("shuts_down", [False, True])
def test_exits_cleanly_from_a_store_that_hangs(server: S3Server, shuts_down: bool) -> None:
    with FaultProxy(server) as proxy:
        settings = proxy.settings("hang", probe="skip")
        with proxy.held():
            process = start(settings, timeout_s=0.5, shuts_down=shuts_down)
            out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "exiting\n")
    assert "Fatal" not in err
    assert "Traceback" not in err


def test_an_exception_at_the_end_stays_what_is_seen(server: S3Server) -> None:
    process = start(server.settings("raise"), "raise SystemExit(3)", shuts_down=False)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (3, "exiting\n", "")
