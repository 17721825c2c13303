"""The demo's workload: conversations over long documents, their turns, and what a turn cost."""

import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvstrata.core.events import PRIMARY_MEDIUM
from kvstrata.engine.chat import Chat
from kvstrata.engine.engine import Engine
from kvstrata.engine.request import Request, Sampling

DOCUMENTS = (
    "LICENSE.txt",
    "textwrap.py",
    "heapq.py",
    "shlex.py",
    "sched.py",
    "fractions.py",
    "queue.py",
    "calendar.py",
    "random.py",
    "graphlib.py",
)
"""Texts that every Python brings along, at least in part."""

QUESTIONS = (
    "What is this text about?",
    "Name one thing that it defines or allows.",
    "Who would need it, and when?",
    "Say the most important point in one sentence.",
    "What would you ask its author?",
)


@dataclass(slots=True)
class Conversation:
    """A document and what was said about it, as tokens."""

    title: str
    tokens: list[int]
    num_turns: int = 0


@dataclass(frozen=True, slots=True)
class TurnCost:
    """One turn: its answer, how long the first token took, and where the prompt's KV came from.

    `tokens` are the prompt's by source: "engine" for the engine's own cache, "computed", "primary"
    for host memory, else a tier's name.
    """

    title: str
    turn: int
    answer: tuple[int, ...]
    num_prompt_tokens: int
    ttft_s: float
    total_s: float
    tokens: Mapping[str, int] = field(default_factory=dict)


def open_conversations(chat: Chat, count: int, num_tokens: int) -> list[Conversation]:
    """Return conversations over different documents, each cut to `num_tokens`.

    Raises:
        FileNotFoundError: This Python's standard library lacks the texts.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    conversations: list[Conversation] = []
    for name in DOCUMENTS:
        path = folder / name
        if len(conversations) == count or not path.exists():
            continue
        document = chat.encode(path.read_text(encoding="utf-8"))[:num_tokens]
        if len(document) == num_tokens:
            conversations.append(Conversation(name, [*chat.open_chat(), *document]))
    if len(conversations) < count:
        raise FileNotFoundError(f"{folder} has too few of {', '.join(DOCUMENTS)}")
    return conversations


def run_turn(engine: Engine, chat: Chat, conversation: Conversation, max_tokens: int) -> TurnCost:
    """Ask the next question, let the engine answer, and wait for its copies to end.

    The conversation grows by question and answer.
    """
    question = QUESTIONS[conversation.num_turns % len(QUESTIONS)]
    prompt = [*conversation.tokens, *chat.user_turn(f"\n\n{question}")]
    sampling = Sampling(max_tokens=max_tokens, stop_tokens=frozenset({chat.end_token}))
    request = engine.add_request(prompt, sampling)
    list(engine.run())
    assert request.first_token_s is not None
    assert request.finished_s is not None
    cost = TurnCost(
        title=conversation.title,
        turn=conversation.num_turns,
        answer=tuple(request.output),
        num_prompt_tokens=len(prompt),
        ttft_s=request.first_token_s - request.arrival_s,
        total_s=request.finished_s - request.arrival_s,
        tokens=_tokens_by_source(engine, request),
    )
    answer = [token for token in request.output if token != chat.end_token]
    conversation.tokens = [*prompt, *answer, *chat.close_turn()]
    conversation.num_turns += 1
    return cost


def _tokens_by_source(engine: Engine, request: Request) -> Mapping[str, int]:
    if engine.connector is None:
        return {
            "engine": request.counts.engine,
            "computed": request.num_prompt_tokens - request.counts.engine,
        }
    record = next(r for r in engine.connector.take_request_records() if r.req_id == request.req_id)
    loaded = {
        "primary" if medium == PRIMARY_MEDIUM else medium: count
        for medium, count in record.tokens_by_medium.items()
    }
    return {"engine": record.engine_tokens, **loaded, "computed": record.missed_tokens}
