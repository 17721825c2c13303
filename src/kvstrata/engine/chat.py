"""What a conversation needs of a tokenizer, and a tokenizer for models that know no text."""

from collections.abc import Sequence
from typing import Protocol


class Chat(Protocol):
    """Text to token ids and back, and the frame around the turns of a conversation."""

    @property
    def end_token(self) -> int:
        """The token that ends an answer."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids."""
        ...

    def open_chat(self) -> list[int]:
        """Return the tokens that a conversation starts with."""
        ...

    def user_turn(self, text: str) -> list[int]:
        """Return the tokens of a user's turn, up to where the model is to answer."""
        ...

    def close_turn(self) -> list[int]:
        """Return what follows an answer before the next turn."""
        ...


class ByteChat:
    """Every byte is a token, and 256 ends an answer."""

    vocab_size = 257
    end_token = 256

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes."""
        return bytes(token for token in tokens if token < self.end_token).decode(errors="replace")

    def open_chat(self) -> list[int]:
        """Return the tokens that a conversation starts with."""
        return self.encode("system: answer\n")

    def user_turn(self, text: str) -> list[int]:
        """Return the tokens of a user's turn, up to where the model is to answer."""
        return self.encode(f"user: {text}\nassistant: ")

    def close_turn(self) -> list[int]:
        """Return what follows an answer before the next turn."""
        return [self.end_token]
