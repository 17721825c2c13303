"""A real model, and bf16: what comes back from offload gives the tokens that vLLM gives without."""

from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
from transformers import AutoTokenizer

from tests.vllm.engine import Engine, Tokens, engine, prompts

NUM_PROMPTS, NUM_NEW = 6, 16
PROMPT_TOKENS, CACHED_TOKENS = 1500, 1408  # eleven full blocks
PRIMARY = {"primary": {"num_chunks": 80}}
TEXT = Path(__file__).parents[2] / "docs" / "decisions"


@pytest.fixture(scope="module")
def text(smollm2: Path) -> Tokens:
    """Prompts in English; other prompts have other answers, so that mixed-up chunks show."""
    pages = "\n".join(path.read_text() for path in sorted(TEXT.glob("*.md")))
    tokens = AutoTokenizer.from_pretrained(smollm2)(pages)["input_ids"]
    assert len(tokens) >= NUM_PROMPTS * PROMPT_TOKENS
    starts = range(0, NUM_PROMPTS * PROMPT_TOKENS, PROMPT_TOKENS)
    return [tokens[start : start + PROMPT_TOKENS] for start in starts]


def timed_round(running: Engine, batch: Tokens) -> tuple[Tokens, float]:
    """One prompt after the other: the tokens, and the median time to the first one."""
    tokens = running.run_each(batch, NUM_NEW)
    return tokens, median(running.first_token_s[-len(batch) :])


def test_smollm2_gives_the_same_tokens_from_host_memory_and_after_a_restart_from_files(
    smollm2: Path, text: Tokens, tmp_path: Path, report: Callable[[str], None]
) -> None:
    with engine(smollm2, None) as plain:
        expected, cold_s = timed_round(plain, text)
    assert len({tuple(tokens) for tokens in expected}) == NUM_PROMPTS
    settings = {**PRIMARY, "tiers": [{"type": "fs", "root": str(tmp_path), "max_bytes": "1GiB"}]}
    options = {"prefix_caching_hash_algo": "sha256_cbor"}
    with engine(smollm2, settings, **options) as ours:
        assert timed_round(ours, text)[0] == expected
        assert ours.counter("vllm:external_prefix_cache_hits") == 0
        again, primary_s = timed_round(ours, text)
        assert again == expected
        assert ours.counter("vllm:kvstrata_primary_tokens") == NUM_PROMPTS * CACHED_TOKENS
        ours.settle()
    with engine(smollm2, settings, **options) as restarted:
        again, files_s = timed_round(restarted, text)
        assert again == expected
        assert restarted.counter("vllm:kvstrata_tier_tokens") == NUM_PROMPTS * CACHED_TOKENS
    report(
        f"SmolLM2, float32, {PROMPT_TOKENS} tokens, median time to the first one: "
        f"{cold_s * 1e3:.0f} ms without a connector, "
        f"{primary_s * 1e3:.0f} from host memory ({cold_s / primary_s:.1f} x faster), "
        f"{files_s * 1e3:.0f} from files after a restart ({cold_s / files_s:.1f} x)"
    )


@pytest.mark.parametrize("name", ["tiny_model", "smollm2"])
def test_in_bf16_a_load_gives_the_tokens_of_a_hit_in_vllms_own_cache(
    name: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(name)
    if name == "smollm2":
        batch = request.getfixturevalue("text")
    else:
        batch = prompts(NUM_PROMPTS, PROMPT_TOKENS, seed=1)
    with engine(model, None, dtype="bfloat16", num_gpu_blocks_override=100) as own:
        cold = own.run_each(batch, NUM_NEW)
        hit = own.run_each(batch, NUM_NEW)
        assert own.counter("vllm:prefix_cache_hits") == NUM_PROMPTS * CACHED_TOKENS
    with engine(model, PRIMARY, dtype="bfloat16") as ours:
        assert ours.run_each(batch, NUM_NEW) == cold
        assert ours.run_each(batch, NUM_NEW) == hit
        assert ours.counter("vllm:external_prefix_cache_hits") == NUM_PROMPTS * CACHED_TOKENS
