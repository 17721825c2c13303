"""Rebuild the byte-level BPE tokenizer of a GGUF file, with the model's chat format."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvstrata.engine.gguf_model import GgufFile

CONTROL_TOKEN = 3  # token type in GGUF
SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class ChatTokenizer:
    """Text to token ids and back, and conversations to prompts."""

    def __init__(self, file: GgufFile) -> None:
        """Read tokens and merges.

        Raises:
            ValueError: The text is to be split in a way that is not known here.
        """
        if file.field("tokenizer.ggml.pre") != "smollm":
            raise ValueError("only the pre-tokenizer of SmolLM is known")
        tokens = file.field("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ", 1)) for merge in file.field("tokenizer.ggml.merges")]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        self._tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        self._tokenizer.decoder = decoders.ByteLevel()
        kinds = file.field("tokenizer.ggml.token_type")
        control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
        self._tokenizer.add_special_tokens([AddedToken(t, special=True) for t in control])
        self.end_token: int = file.field("tokenizer.ggml.eos_token_id")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; names of control tokens in it become these tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, control tokens left out."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def open_chat(self, system: str = SYSTEM_PROMPT) -> list[int]:
        """Return the tokens that a conversation starts with."""
        return self.encode(f"<|im_start|>system\n{system}<|im_end|>\n")

    def user_turn(self, text: str) -> list[int]:
        """Return the tokens of a user's turn, up to where the model is to answer."""
        return self.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")

    def close_turn(self) -> list[int]:
        """Return what follows an answer before the next turn."""
        return self.encode("<|im_end|>\n")
