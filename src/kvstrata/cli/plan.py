"""`kvstrata plan`: what sizes and policies would bring on a trace."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvstrata.cli.trace_options import (
    AsJson,
    ChunkBytes,
    Group,
    HorizonSeconds,
    Sessions,
    StepSeconds,
    TokensPerChunk,
    TracePath,
)
from kvstrata.core.errors import ConfigError
from kvstrata.core.memory import row_bytes_for
from kvstrata.core.settings import parse_bytes
from kvstrata.replay.geometry import ModelGeometry
from kvstrata.replay.plan import Cell, Planner, as_json, next_gib
from kvstrata.replay.report import size_text
from kvstrata.replay.trace import Interleaving, Trace, open_trace

_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2)

Model = Annotated[
    Path | None, typer.Option(help="config.json of the model: gives the bytes of a chunk.")
]
Ram = Annotated[
    str | None, typer.Option(help='Sizes of the primary, such as "64GiB,128GiB"; default: shares.')
]


def plan(
    trace: TracePath,
    *,
    model: Model = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Of the cache, if not the model's.")] = None,
    chunk_bytes: ChunkBytes = None,
    ram: Ram = None,
    disk: Annotated[str, typer.Option(help='Sizes of the disk, such as "0,1TiB".')] = "0",
    policies: Annotated[str, typer.Option(help="Policies of the primary.")] = "auto,lru",
    sessions: Sessions = None,
    step_s: StepSeconds = 60.0,
    horizon_s: HorizonSeconds = None,
    group: Group = 1,
    tokens_per_chunk: TokensPerChunk = None,
    json_output: AsJson = False,
) -> None:
    """Replay the trace with each policy and size, next to what no policy could exceed."""
    source = open_trace(trace, Interleaving(sessions, step_s, horizon_s, group), tokens_per_chunk)
    num_bytes = _chunk_bytes(source, model, kv_dtype, chunk_bytes)
    rams = _sizes(ram, "--ram") if ram else _share_sizes(source, num_bytes)
    with Console(stderr=True).status("") as status:
        planner = Planner(source, num_bytes, status.update)
        cells = list(planner.cells(policies.split(","), rams, _sizes(disk, "--disk")))
    if json_output:
        print(json.dumps(as_json(cells, num_bytes, source.tokens_per_chunk)))
    else:
        _print(trace.name, num_bytes, cells)


def _chunk_bytes(trace: Trace, model: Path | None, dtype: str | None, text: str | None) -> int:
    if (model is None) == (text is None):
        raise ConfigError("plan", "needs exactly one of --model and --chunk-bytes")
    if text is not None:
        return parse_bytes(text, "--chunk-bytes")
    assert model is not None
    return ModelGeometry.read(model, dtype).token_bytes * trace.tokens_per_chunk


def _sizes(text: str, path: str) -> list[int]:
    return [0 if size.strip() == "0" else parse_bytes(size, path) for size in text.split(",")]


def _share_sizes(trace: Trace, chunk_bytes: int) -> list[int]:
    num_chunks = trace.count_distinct()
    return [max(1, round(share * num_chunks)) * row_bytes_for(chunk_bytes) for share in _SHARES]


def _print(name: str, chunk_bytes: int, cells: list[Cell]) -> None:
    console = Console()
    table = Table(title=f"{name}: chunks of {size_text(chunk_bytes)}")
    for title in ("policy", "RAM", "disk", "RAM tokens", "disk tokens", "hits %", "RAM %",
                  "disk %", "bound %", "to disk/day"):  # fmt: skip
        table.add_column(title, justify="left" if title == "policy" else "right")
    for cell in cells:
        table.add_row(
            cell.policy,
            size_text(cell.ram_bytes),
            size_text(cell.disk_bytes) if cell.disk_bytes else "",
            f"{cell.ram_tokens:,}",
            f"{cell.disk_tokens:,}" if cell.disk_bytes else "",
            f"{100 * cell.hit_ratio:.2f}",
            f"{100 * cell.ram_hit_ratio:.2f}",
            f"{100 * cell.disk_hit_ratio:.2f}" if cell.disk_bytes else "",
            f"{100 * cell.bound:.2f}",
            size_text(cell.disk_bytes_per_day) if cell.disk_bytes else "",
        )
    console.print(table)
    steps = Table(title="what a GiB more brings")
    for title in ("of", "policy", "from", "to", "hits, points", "tokens/s not computed"):
        steps.add_column(title, justify="left" if title in {"of", "policy"} else "right")
    for step in next_gib(cells):
        steps.add_row(
            "RAM" if step["of"] == "ram" else "disk",
            step["policy"],
            size_text(step["from_bytes"]),
            size_text(step["to_bytes"]),
            f"{step['hit_points']:.4f}",
            f"{step['hit_tokens_per_s']:,.1f}",
        )
    console.print(steps)
