from threading import Barrier, BrokenBarrierError

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstrata.engine.model import KVGroup, ModelConfig, PagedKV, Segment, Transformer, Weights
from kvstrata.engine.rows import Array
from kvstrata.engine.tiny import tiny_config, tiny_weights

GROUPS = (
    KVGroup(layers=(0, 2), tokens_per_block=4),
    KVGroup(layers=(1,), tokens_per_block=6, window=9),
)
CONFIG = tiny_config(GROUPS)
MODEL = Transformer(CONFIG, tiny_weights(CONFIG, seed=3))
NUM_BLOCKS = (100, 100)

Dense = NDArray[np.float64]


def make_tokens(count: int, seed: int = 0) -> list[int]:
    return list(map(int, np.random.default_rng(seed).integers(0, CONFIG.vocab_size, count)))


def make_tables(seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [(random.permutation(count - 1) + 1).tolist() for count in NUM_BLOCKS]


def dense_logits(config: ModelConfig, weights: Weights, tokens: list[int]) -> Dense:
    """The same model in float64, with neither blocks nor tiles: logits at the last token."""
    window_of = {layer: group.window for group in config.groups for layer in group.layers}
    count, dim = len(tokens), config.head_dim
    x = weights.embedding[tokens].astype(np.float64)
    rows = np.arange(count)

    def norm(x: Dense, weight: Array) -> Dense:
        return np.asarray(
            x / np.sqrt((x * x).mean(axis=1, keepdims=True) + config.norm_eps) * weight
        )

    def rotate(heads: Dense) -> Dense:
        angles = rows[:, None] * config.rope_theta ** (-np.arange(0, dim, 2) / dim)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        even, odd = heads[..., 0::2], heads[..., 1::2]
        out = np.empty_like(heads)
        out[..., 0::2], out[..., 1::2] = even * cos - odd * sin, even * sin + odd * cos
        return out

    for layer, w in enumerate(weights.layers):
        heads = (norm(x, w.attention_norm) @ w.qkv).reshape(count, -1, dim)
        q, k, v = np.split(
            heads, [config.num_heads, config.num_heads + config.num_kv_heads], axis=1
        )
        q, k = rotate(q), rotate(k)
        share = config.num_heads // config.num_kv_heads
        seen = rows[None, :] <= rows[:, None]
        window = window_of[layer]
        if window is not None:
            seen &= rows[:, None] - rows[None, :] < window
        out = np.empty_like(q)
        for head in range(config.num_heads):
            scores = q[:, head] @ k[:, head // share].T / np.sqrt(dim)
            scores = np.exp(np.where(seen, scores, -np.inf))
            out[:, head] = scores / scores.sum(axis=1, keepdims=True) @ v[:, head // share]
        x = x + out.reshape(count, -1) @ w.output
        gate, up = np.split(norm(x, w.ffn_norm) @ w.gate_up, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w.down
    return np.asarray(norm(x, weights.final_norm)[-1] @ weights.head)


def run_in_pieces(
    tokens: list[int], cuts: list[int], kv: PagedKV, tables: list[list[int]]
) -> Array:
    pieces = zip([0, *cuts], [*cuts, len(tokens)], strict=True)
    logits = [
        MODEL.forward([Segment(tokens[start:end], start, tables)], kv) for start, end in pieces
    ]
    last: Array = np.concatenate(logits)[-1]
    return last


@pytest.mark.parametrize("count", [1, 7, 140])
def test_logits_are_those_of_a_dense_model(count: int) -> None:
    tokens = make_tokens(count)
    logits = run_in_pieces(tokens, [], PagedKV(CONFIG, NUM_BLOCKS), make_tables())
    assert np.allclose(logits, dense_logits(CONFIG, MODEL.weights, tokens), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("cuts", [[1], [5, 6, 7], [64, 130], list(range(1, 140))])
def test_logits_and_kv_are_the_same_however_a_prompt_is_cut(cuts: list[int]) -> None:
    tokens, tables = make_tokens(140), make_tables()
    whole, pieces = PagedKV(CONFIG, NUM_BLOCKS), PagedKV(CONFIG, NUM_BLOCKS)
    expected = run_in_pieces(tokens, [], whole, tables)
    assert np.array_equal(run_in_pieces(tokens, cuts, pieces, tables), expected)
    for one, other in zip(whole.blocks, pieces.blocks, strict=True):
        assert np.array_equal(one, other)


def test_logits_do_not_depend_on_the_requests_beside_them() -> None:
    first, second = make_tokens(37, seed=1), make_tokens(90, seed=2)
    tables = make_tables()
    halves = [[t[:50] for t in tables], [t[50:] for t in tables]]
    kv = PagedKV(CONFIG, NUM_BLOCKS)
    together = MODEL.forward([Segment(first, 0, halves[0]), Segment(second, 0, halves[1])], kv)
    for logits, tokens in zip(together, (first, second), strict=True):
        alone = run_in_pieces(tokens, [], PagedKV(CONFIG, NUM_BLOCKS), make_tables(5))
        assert np.array_equal(logits, alone)


def test_what_blocks_held_before_does_not_matter() -> None:
    tokens, tables = make_tokens(50), make_tables()
    kv = PagedKV(CONFIG, NUM_BLOCKS)
    expected = run_in_pieces(tokens, [20], kv, tables)
    for blocks in kv.blocks:
        blocks[:] = 1e6
    assert np.array_equal(run_in_pieces(tokens, [20], kv, tables), expected)


def test_a_layer_in_no_group_is_refused() -> None:
    with pytest.raises(ValueError, match="exactly one KV group"):
        tiny_config((KVGroup(layers=(1,), tokens_per_block=4),))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_logits_are_the_same_on_several_threads(num_threads: int) -> None:
    parallel = pytest.importorskip("kvstrata.engine.parallel")
    threaded = Transformer(CONFIG, MODEL.weights, parallel.StepThreads(num_threads))
    segments = [
        Segment(make_tokens(70, seed=1), 0, [t[:50] for t in make_tables()]),
        Segment(make_tokens(41, seed=2), 0, [t[50:] for t in make_tables()]),
    ]
    one, several = PagedKV(CONFIG, NUM_BLOCKS), PagedKV(CONFIG, NUM_BLOCKS)
    assert np.array_equal(threaded.forward(segments, several), MODEL.forward(segments, one))
    for mine, theirs in zip(one.blocks, several.blocks, strict=True):
        assert np.array_equal(mine, theirs)


def test_an_error_on_one_thread_ends_the_step() -> None:
    parallel = pytest.importorskip("kvstrata.engine.parallel")

    def compute(part: int, meeting: Barrier) -> None:
        if part == 1:
            raise ValueError(part)
        meeting.wait()

    with pytest.raises((ValueError, BrokenBarrierError)):
        parallel.StepThreads(3).run([0, 1, 2], compute)
