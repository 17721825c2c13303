"""`kvstrata bench engine`: what the connector costs an engine that finds nothing to load."""

import json
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from kvstrata.build import build_manager
from kvstrata.cli.demo_run import TOKENS_PER_BLOCK, DemoModel, load_model
from kvstrata.engine.engine import Engine, EngineConfig
from kvstrata.engine.request import Sampling

NUM_REQUESTS = 4  # at the same time


@dataclass(frozen=True, slots=True)
class EngineCost:
    """Tokens, prompts' and answers', a second; medians over rounds, and of the rounds' ratios."""

    model: str
    num_rounds: int
    plain_tokens_per_s: float
    connected_tokens_per_s: float
    throughput_ratio: float
    stored_bytes: int


def engine(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each kind, in turn.")] = 9,
    prompt: Annotated[int, typer.Option(min=16, help="Tokens of a prompt.")] = 256,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 16,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run prompts that never repeat with and without the connector, in turn."""
    cost = measure(load_model(), rounds, prompt, answer)
    if json_output:
        print(json.dumps(asdict(cost)))
        return
    table = Table(title=f"{cost.model}: nothing to load, median of {rounds} rounds")
    for title in ("tokens/s without", "tokens/s with", "ratio", "MB stored"):
        table.add_column(title, justify="right")
    table.add_row(
        f"{cost.plain_tokens_per_s:,.0f}",
        f"{cost.connected_tokens_per_s:,.0f}",
        f"{cost.throughput_ratio:.3f}",
        f"{cost.stored_bytes / 1e6:,.0f}",
    )
    Console().print(table)


def measure(model: DemoModel, num_rounds: int, num_prompt: int, num_answer: int) -> EngineCost:
    """Measure both engines round by round: what else the machine does hits both."""
    shapes = model.transformer.config
    num_blocks = NUM_REQUESTS * (num_prompt + num_answer + TOKENS_PER_BLOCK) // TOKENS_PER_BLOCK
    config = EngineConfig((num_blocks + 1,), (1,))
    manager = build_manager(
        {"primary": {"num_chunks": 2 * num_blocks, "policy": "lru"}},
        chunk_bytes=config.chunk_bytes(shapes),
        namespace=config.namespace(shapes, revision=model.revision),
        shared=False,
    )
    plain = Engine(model.transformer, config)
    connected = Engine(model.transformer, config, manager)
    random = np.random.default_rng(0)
    times_s: dict[bool, list[float]] = {False: [], True: []}
    for index in range(num_rounds + 1):
        shape = (NUM_REQUESTS, num_prompt)
        prompts = [[int(t) for t in p] for p in random.integers(0, shapes.vocab_size, shape)]
        for with_connector in (False, True) if index % 2 else (True, False):
            taken_s = _run_round(connected if with_connector else plain, prompts, num_answer)
            if index:  # the first round warms up
                times_s[with_connector].append(taken_s)
    stored_bytes = int(manager.get_stats()["stored_bytes"])
    connected.close()
    num_tokens = NUM_REQUESTS * (num_prompt + num_answer)
    pairs = zip(times_s[False], times_s[True], strict=True)
    return EngineCost(
        model=model.name,
        num_rounds=num_rounds,
        plain_tokens_per_s=num_tokens / median(times_s[False]),
        connected_tokens_per_s=num_tokens / median(times_s[True]),
        throughput_ratio=median(without / with_it for without, with_it in pairs),
        stored_bytes=stored_bytes,
    )


def _run_round(engine: Engine, prompts: list[list[int]], num_answer: int) -> float:
    start_s = time.perf_counter()
    for prompt in prompts:
        engine.add_request(prompt, Sampling(max_tokens=num_answer))
    while engine.has_requests:
        engine.step()
    taken_s = time.perf_counter() - start_s
    list(engine.run())  # what is still copied
    return taken_s
