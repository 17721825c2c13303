"""Make up traces of any length: sessions of several turns that share system prompts."""

import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from random import Random
from typing import Final, NamedTuple, TextIO, cast

from typing_extensions import override

from kvstrata.core.keys import OffloadKey  # noqa: TC001
from kvstrata.replay.trace import Trace, TraceRequest

_SHARED: Final = 1 << 63
_PER_SESSION: Final = 24  # bits that number the blocks of one session, or of one system prompt


@dataclass(frozen=True, slots=True)
class Workload:
    """What the sessions are like; lengths are in blocks, and are means where they vary.

    Attributes:
        num_requests: Length of the trace.
        requests_per_s: All sessions together.
        turns: Per session.
        gap_s: From one turn to the next.
        num_prompts: System prompts; the n-th is used 1/n as often as the first.
        prompt_blocks: Length of each of these.
        turn_blocks: That a turn adds to its session.
        tokens_per_block: Tokens in each block.
        seed: Equal seeds make equal traces.
    """

    num_requests: int = 100_000
    requests_per_s: float = 10.0
    turns: float = 4.0
    gap_s: float = 60.0
    num_prompts: int = 50
    prompt_blocks: int = 4
    turn_blocks: float = 4.0
    tokens_per_block: int = 512
    seed: int = 1


class _Turn(NamedTuple):
    """A request to come; ordered by time."""

    at_s: float
    session: int
    prompt: int
    num_blocks: int  # of its own, without the system prompt


class _Path(NamedTuple):
    at_s: float
    ids: list[int]


class SyntheticTrace(Trace):
    """Sessions begin at random times; each turn repeats all before it and adds some blocks.

    In memory are only the next turns of the sessions that are under way.
    """

    def __init__(self, workload: Workload) -> None:
        """Take what the sessions are like."""
        self._workload = workload
        self.tokens_per_chunk = workload.tokens_per_block

    @override
    def requests(self) -> Iterator[TraceRequest]:
        tokens = self.tokens_per_chunk
        for at_s, ids in self._paths():
            keys = cast("list[OffloadKey]", [(name << 32).to_bytes(36, "big") for name in ids])
            yield TraceRequest(at_s, keys, len(keys) * tokens, is_partial=False)

    def _paths(self) -> Iterator[_Path]:
        """Yield the blocks of each request by time."""
        how = self._workload
        rng = Random(how.seed)
        prompts = range(how.num_prompts)
        odds = [1 / (n + 1) for n in prompts]
        end, grow = 1 - 1 / how.turns, how.turns / how.requests_per_s
        waiting: list[_Turn] = []
        begins_s, session = 0.0, 0
        for _ in range(how.num_requests):
            while not waiting or begins_s <= waiting[0].at_s:
                prompt = rng.choices(prompts, odds)[0] if prompts else 0
                blocks = _geometric(rng, how.turn_blocks)
                heapq.heappush(waiting, _Turn(begins_s, session, prompt, blocks))
                begins_s += rng.expovariate(1.0) * grow
                session += 1
            turn = waiting[0]
            if rng.random() < end:
                at_s = turn.at_s + rng.expovariate(1.0) * how.gap_s
                num_blocks = turn.num_blocks + _geometric(rng, how.turn_blocks)
                heapq.heapreplace(waiting, turn._replace(at_s=at_s, num_blocks=num_blocks))
            else:
                heapq.heappop(waiting)
            shared = _SHARED | turn.prompt << _PER_SESSION
            own = turn.session << _PER_SESSION
            shared_ids = range(shared, shared + (how.prompt_blocks if prompts else 0))
            yield _Path(turn.at_s, [*shared_ids, *range(own, own + turn.num_blocks)])

    def write(self, file: TextIO) -> None:
        """Write the trace as JSON lines with `hash_ids`, as `open_trace` reads them."""
        tokens = self.tokens_per_chunk
        for at_s, ids in self._paths():
            row = {"timestamp": round(1000 * at_s), "input_length": len(ids) * tokens}
            file.write(json.dumps({**row, "hash_ids": ids}) + "\n")


def _geometric(rng: Random, mean: float) -> int:
    """Draw a whole number from 1 on."""
    if mean <= 1:
        return 1
    return 1 + int(log(1.0 - rng.random()) / log(1 - 1 / mean))
