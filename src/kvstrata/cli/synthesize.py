"""`kvstrata synthesize`: make up a trace of any length."""

import gzip
from pathlib import Path
from typing import Annotated

import typer

from kvstrata.replay.synthesize import SyntheticTrace, Workload


def synthesize(
    path: Annotated[Path, typer.Argument(help="File to write; .gz compresses it.")],
    *,
    requests: Annotated[int, typer.Option(min=1, help="Length of the trace.")] = 100_000,
    requests_per_s: Annotated[float, typer.Option(help="All sessions together.")] = 10.0,
    turns: Annotated[float, typer.Option(min=1, help="Per session, on average.")] = 4.0,
    gap_s: Annotated[float, typer.Option(help="Between two turns, on average.")] = 60.0,
    prompts: Annotated[int, typer.Option(min=0, help="Different system prompts.")] = 50,
    prompt_blocks: Annotated[int, typer.Option(min=0, help="Blocks of each of these.")] = 4,
    turn_blocks: Annotated[float, typer.Option(min=1, help="Blocks that a turn adds.")] = 4.0,
    tokens_per_block: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 512,
    seed: Annotated[int, typer.Option(help="Equal seeds make equal traces.")] = 1,
) -> None:
    """Write a trace of sessions that repeat their own past and share system prompts."""
    workload = Workload(
        requests, requests_per_s, turns, gap_s, prompts, prompt_blocks, turn_blocks,
        tokens_per_block, seed,
    )  # fmt: skip
    trace = SyntheticTrace(workload)
    if path.suffix == ".gz":
        with gzip.open(path, "wt", encoding="utf-8") as packed:
            trace.write(packed)
    else:
        with path.open("w", encoding="utf-8") as plain:
            trace.write(plain)
