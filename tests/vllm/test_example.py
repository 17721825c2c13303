"""What examples/vllm ships, run as it is: the command, the settings, and the client."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.vllm.server import serving

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm"
# So that the six prompts do not fit into what vLLM keeps itself.
SMALL = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048",
         "--num-gpu-blocks-override", "20")  # fmt: skip


def test_the_client_is_served_from_offload_in_its_second_round(
    smollm2: Path, tmp_path: Path
) -> None:
    environment = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "KVSTRATA__TIERS__0__ROOT": str(tmp_path / "kv"),
    }
    command = ["bash", str(EXAMPLE / "serve.sh"), str(smollm2), *SMALL]
    with serving(command, tmp_path / "log", **environment) as server:
        client = [sys.executable, str(EXAMPLE / "client.py"), "--url", server.url]
        done = subprocess.run(client, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        first, second, sum_up = done.stdout.splitlines()
        assert first.endswith(" 0 tokens loaded"), done.stdout
        num_loaded = re.search(r"(\d+) tokens loaded", second)
        assert num_loaded is not None, done.stdout
        assert int(num_loaded[1]) >= 6 * 1536, done.stdout
        assert sum_up.endswith("the same texts"), done.stdout
        stored = server.metric("vllm:kvstrata_stored_chunks_total")
        server.wait_for_metric("vllm:kvstrata_tier_stored_chunks_total", stored, tier="fs")
    assert any((tmp_path / "kv").iterdir())
