"""`kvstrata bench manager`: what the manager costs per block of a trace."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvstrata.replay.bench import bench_manager
from kvstrata.replay.trace import open_trace

TITLES = {
    "requests": "requests",
    "blocks": "blocks",
    "hit_ratio": "hit ratio",
    "blocks_per_s": "blocks/s",
    "us_per_block": "us/block",
    "p50_us": "p50 us/request",
    "p99_us": "p99 us/request",
    "bytes_per_chunk": "bytes/resident chunk",
}


def manager(
    trace: Annotated[Path, typer.Option(help="Request trace with block hashes.")],
    slots: Annotated[int, typer.Option(min=1, help="Places in the primary.")] = 20_000,
    policy: Annotated[str, typer.Option(help="Eviction policy.")] = "auto",
    passes: Annotated[
        int, typer.Option(min=1, help="Times to replay; each request's fastest time counts.")
    ] = 10,
    *,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay a trace through the manager and measure its own work, without copies.

    All times are made of each request's fastest of the passes, so that they hold on a busy machine.
    """
    cost = bench_manager(open_trace(trace), slots, policy, passes)
    if json_output:
        print(json.dumps(cost.as_json()))
        return
    title = f"{trace.name}: {slots} slots, {policy}, each request's fastest of {passes} passes"
    table = Table(title=title)
    table.add_column("")
    table.add_column("", justify="right")
    values = cost.as_json()
    for name, title in TITLES.items():
        table.add_row(title, _text(values[name]))
    Console().print(table)


def _text(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
