"""Run the demo's phases: without offloading, with it, and again in a second process."""

import hashlib
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from kvstrata.build import build_manager
from kvstrata.engine.chat import ByteChat, Chat
from kvstrata.engine.demo_workload import Conversation, TurnCost, open_conversations, run_turn
from kvstrata.engine.engine import Engine, EngineConfig
from kvstrata.engine.model import KVGroup, Transformer
from kvstrata.engine.tiny import tiny_config, tiny_weights

TOKENS_PER_BLOCK = 16
NUM_THREADS_MAX = 8
TINY_GROUPS = (KVGroup((0, 1), TOKENS_PER_BLOCK),)


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """How much the demo does.

    Attributes:
        num_conversations: Each over its own document.
        num_document_tokens: Tokens of a document.
        num_turns: Turns of each conversation in the first process.
        num_late_turns: Turns of each conversation in the second process.
        num_answer_tokens: Longest answer.
        share_of_engine: Part of all conversations that the engine's own blocks can hold.
        root: Directory of the fs tier, shared by both processes.
    """

    num_conversations: int
    num_document_tokens: int
    num_turns: int
    num_late_turns: int
    num_answer_tokens: int
    share_of_engine: float
    root: Path

    @property
    def num_tokens_max(self) -> int:
        """More tokens than a conversation has at its end."""
        turn_tokens = 64 + self.num_answer_tokens
        return self.num_document_tokens + 64 + (self.num_turns + self.num_late_turns) * turn_tokens

    @property
    def num_chunks(self) -> int:
        """Chunks of all conversations at their ends."""
        return -(-self.num_conversations * self.num_tokens_max // TOKENS_PER_BLOCK)

    @property
    def num_engine_blocks(self) -> int:
        """Blocks of the engine, the null block included."""
        one = -(-self.num_tokens_max // TOKENS_PER_BLOCK)
        return 1 + max(one, int(self.num_chunks * self.share_of_engine))


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model with what belongs to it; `revision` changes with the weights."""

    transformer: Transformer
    chat: Chat
    revision: str

    @property
    def name(self) -> str:
        """The model's name."""
        return self.transformer.config.name


@dataclass(slots=True)
class DemoResult:
    """What was measured: turns without offloading, with it, and with it in the second process."""

    model: str
    plan: DemoPlan
    computed: list[TurnCost] = field(default_factory=list)
    offloaded: list[TurnCost] = field(default_factory=list)
    late: list[TurnCost] = field(default_factory=list)
    moved_bytes: dict[str, int] = field(default_factory=dict)


def load_model() -> DemoModel:
    """Load SmolLM2, or make a tiny random model where it can't be loaded."""
    try:
        from kvstrata.engine.gguf_model import (  # noqa: PLC0415
            GgufFile,
            find_smollm2,
            load_config,
            load_weights,
        )
        from kvstrata.engine.parallel import StepThreads  # noqa: PLC0415
        from kvstrata.engine.tokenizer import ChatTokenizer  # noqa: PLC0415
    except ImportError:
        return tiny_model()
    path = find_smollm2()
    if path is None:
        return tiny_model()
    file = GgufFile(path)
    config = load_config(file, tokens_per_block=TOKENS_PER_BLOCK)
    with path.open("rb") as stream:
        revision = hashlib.file_digest(stream, "sha256").hexdigest()
    threads = StepThreads(min(NUM_THREADS_MAX, len(os.sched_getaffinity(0))))
    transformer = Transformer(config, load_weights(file, config), threads)
    return DemoModel(transformer, ChatTokenizer(file), revision)


def tiny_model() -> DemoModel:
    """Make a small model with random weights: it writes nonsense, the same every time."""
    config = tiny_config(TINY_GROUPS, vocab_size=ByteChat.vocab_size)
    return DemoModel(Transformer(config, tiny_weights(config)), ByteChat(), "seed 0")


def run_demo(model: DemoModel, plan: DemoPlan) -> Iterator[tuple[str, TurnCost, DemoResult]]:
    """Run all phases; yield after each turn the phase's name, the turn, and all there is so far."""
    result = DemoResult(model.name, plan)
    conversations = open_conversations(model.chat, plan.num_conversations, plan.num_document_tokens)
    engine = Engine(model.transformer, engine_config(plan))
    for cost in _run_turns(engine, model.chat, conversations, plan):
        result.computed.append(cost)
        yield "computed", cost, result
    engine.close()

    conversations = open_conversations(model.chat, plan.num_conversations, plan.num_document_tokens)
    engine = make_offloading_engine(model, plan)
    for cost in _run_turns(engine, model.chat, conversations, plan, until=plan.num_turns):
        result.offloaded.append(cost)
        yield "offloaded", cost, result
    add_moved_bytes(engine, result.moved_bytes)
    engine.close()

    for item in _run_second_process(model.name, plan, conversations):
        if isinstance(item, TurnCost):
            result.late.append(item)
            yield "late", item, result
        else:
            for name, size in item.items():
                result.moved_bytes[name] = result.moved_bytes.get(name, 0) + size


def engine_config(plan: DemoPlan) -> EngineConfig:
    """Return the engine's sizes: a chunk is one block, so that little is left to recompute."""
    return EngineConfig(num_blocks=(plan.num_engine_blocks,), blocks_per_chunk=(1,))


def make_offloading_engine(model: DemoModel, plan: DemoPlan) -> Engine:
    """Make an engine with host memory for all conversations, and files below it."""
    config, shapes = engine_config(plan), model.transformer.config
    chunk_bytes = config.chunk_bytes(shapes)
    manager = build_manager(
        {
            "primary": {"num_chunks": plan.num_chunks},
            "tokens_per_chunk": TOKENS_PER_BLOCK,
            "tiers": [
                {
                    "type": "fs",
                    "root": str(plan.root),
                    "max_bytes": 2 * plan.num_chunks * (chunk_bytes + 4096),
                }
            ],
        },
        chunk_bytes=chunk_bytes,
        namespace=config.namespace(shapes, revision=model.revision),
        shared=False,
    )
    return Engine(model.transformer, config, manager)


def add_moved_bytes(engine: Engine, moved_bytes: dict[str, int]) -> None:
    """Add up what went between engine, primary and tiers."""
    assert engine.connector is not None
    stats = engine.connector.manager.get_stats()
    counters = {"primary": stats.counters} | {n: t.counters for n, t in stats.tiers.items()}
    for medium, values in counters.items():
        for kind in ("stored", "loaded"):
            name = f"{medium}_{kind}"
            size = int(values.get(f"{kind}_bytes", 0))
            moved_bytes[name] = moved_bytes.get(name, 0) + size


def _run_turns(
    engine: Engine,
    chat: Chat,
    conversations: list[Conversation],
    plan: DemoPlan,
    *,
    until: int | None = None,
) -> Iterator[TurnCost]:
    """Go round: every conversation's next turn, then each one's next."""
    until = plan.num_turns + plan.num_late_turns if until is None else until
    for _ in range(conversations[0].num_turns, until):
        for conversation in conversations:
            yield run_turn(engine, chat, conversation, plan.num_answer_tokens)


def _run_second_process(
    model_name: str, plan: DemoPlan, conversations: list[Conversation]
) -> Iterator[TurnCost | Mapping[str, int]]:
    """Continue in a process of its own that shares nothing with this one but the files.

    Raises:
        EOFError: It ended early.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(
        target=continue_conversations, args=(there, model_name, plan, conversations)
    )
    process.start()
    there.close()
    try:
        for _ in range(plan.num_late_turns * len(conversations)):
            yield here.recv()
        yield here.recv()
    finally:
        here.close()
        process.join()


def continue_conversations(
    pipe: Connection, model_name: str, plan: DemoPlan, conversations: list[Conversation]
) -> None:
    """Run the late turns and send each one's cost, then what was moved (in the second process)."""
    model = tiny_model() if model_name == tiny_model().name else load_model()
    engine = make_offloading_engine(model, plan)
    for cost in _run_turns(engine, model.chat, conversations, plan):
        pipe.send(cost)
    moved_bytes: dict[str, int] = {}
    add_moved_bytes(engine, moved_bytes)
    pipe.send(moved_bytes)
    engine.close()
