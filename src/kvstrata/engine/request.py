"""One request as the engine knows it: its tokens, its blocks and how far it is computed."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvstrata.core.namespace import NO_EXTRAS, HashExtras, hash_blocks


class Status(Enum):
    """Where a request is."""

    WAITING = "waiting"  # has no blocks
    LOADING = "loading"  # has blocks that the connector fills
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen, and when to stop.

    A temperature of 0 takes the likeliest token. Otherwise the choice depends on the seed, the
    position and the logits alone, so that a preempted request goes on as it would have.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()


GREEDY = Sampling()


@dataclass(slots=True)
class TokenCounts:
    """Where a request's KV came from, over all its starts; a preemption makes it start again."""

    engine: int = 0  # found in the engine's own blocks
    loaded: int = 0
    computed: int = 0
    preemptions: int = 0


class Request:
    """A growing list of tokens and the blocks that hold their KV; the scheduler changes it.

    It is what the connector sees as `EngineRequest`.
    """

    def __init__(
        self,
        req_id: str,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        tokens_per_hash: int,
        kv_transfer_params: Mapping[str, Any] | None = None,
        extras: HashExtras = NO_EXTRAS,
    ) -> None:
        """Start with a prompt of at least one token."""
        if not prompt:
            raise ValueError("the prompt is empty")
        self.req_id = req_id
        self.tokens = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.sampling = sampling
        self.kv_transfer_params = kv_transfer_params
        self.status = Status.WAITING
        self.num_computed_tokens = 0
        self.tables: list[list[int]] = []
        self.num_published: list[int] = []
        self.counts = TokenCounts()
        self.arrival_s = time.monotonic()
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self._tokens_per_hash = tokens_per_hash
        self._extras = extras
        self._hashes: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.tokens)

    @property
    def output(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_tokens_max(self) -> int:
        """Tokens that the request can have at the end."""
        return self.num_prompt_tokens + self.sampling.max_tokens

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hashes, one for every full `tokens_per_hash` tokens known."""
        if len(self._hashes) < len(self.tokens) // self._tokens_per_hash:
            self._hashes = hash_blocks(
                self.tokens, self._tokens_per_hash, self._extras, known=self._hashes
            )
        return self._hashes

    @property
    def is_over(self) -> bool:
        """Whether the output ends here: by length or by a stop token."""
        num_output = len(self.tokens) - self.num_prompt_tokens
        return num_output >= self.sampling.max_tokens or (
            num_output > 0 and self.tokens[-1] in self.sampling.stop_tokens
        )
