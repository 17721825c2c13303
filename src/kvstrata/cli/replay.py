"""`kvstrata replay`: a request trace through the production manager."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvstrata.core.errors import ConfigError
from kvstrata.replay.simulate import Order, Partial, ReplayResult, replay_primary
from kvstrata.replay.trace import Interleaving, Trace, open_trace


def replay(
    trace: Annotated[Path, typer.Argument(help="Request trace, plain or gzip.")],
    *,
    policy: Annotated[str, typer.Option(help="Policy, or min for the offline bound.")] = "auto",
    num_chunks: Annotated[int | None, typer.Option(min=1, help="Places in the primary.")] = None,
    share: Annotated[
        float | None, typer.Option(help="Places as a share of the trace's distinct blocks.")
    ] = None,
    order: Annotated[Order | None, typer.Option(help="Order within a request.")] = None,
    partial: Annotated[
        Partial | None, typer.Option(help="Whether last blocks that are not full are stored.")
    ] = None,
    sessions: Annotated[int | None, typer.Option(help="Sessions to interleave.")] = None,
    step_s: Annotated[float, typer.Option(help="Seconds between two sessions' starts.")] = 60.0,
    horizon_s: Annotated[float | None, typer.Option(help="Leave out what comes later.")] = None,
    group: Annotated[int, typer.Option(min=1, help="Recorded blocks per chunk.")] = 1,
    tokens_per_chunk: Annotated[
        int | None, typer.Option(min=1, help="For traces without block hashes.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay a trace, hours of it in seconds, and count what each tier hits and writes."""
    interleaving = Interleaving(sessions, step_s, horizon_s, group)
    source = open_trace(trace, interleaving, tokens_per_chunk)
    result = _with_progress(
        source, policy, _num_chunks(source, num_chunks, share), order=order, partial=partial
    )
    if json_output:
        print(json.dumps(result.as_json()))
    else:
        _print(trace, result)


def _num_chunks(trace: Trace, num_chunks: int | None, share: float | None) -> int:
    if (num_chunks is None) == (share is None):
        raise ConfigError("replay", "needs exactly one of --num-chunks and --share")
    if num_chunks is not None:
        return num_chunks
    assert share is not None
    if share <= 0:
        raise ConfigError("replay", f"--share must be more than 0, is {share}")
    return max(1, round(share * trace.count_distinct()))


def _with_progress(
    trace: Trace, policy: str, num_chunks: int, *, order: Order | None, partial: Partial | None
) -> ReplayResult:
    columns = SpinnerColumn(), TextColumn("{task.completed:,.0f} requests"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("replay", total=None)
        return replay_primary(
            trace,
            policy,
            num_chunks,
            order=order,
            partial=partial,
            on_progress=lambda done: progress.update(task, completed=done),
        )


def _print(path: Path, result: ReplayResult) -> None:
    table = Table(title=f"{path.name}: policy {result.policy}, {result.num_chunks:,} chunks")
    table.add_column("")
    table.add_column("", justify="right")
    for title, text in (
        ("requests", f"{result.requests:,}"),
        ("trace time", f"{result.seconds:,.0f} s"),
        ("blocks", f"{result.blocks:,}"),
        ("hits", f"{result.hits:,}"),
        ("hit ratio", f"{100 * result.hit_ratio:.2f} %"),
        ("hit ratio by tokens", f"{100 * result.token_hit_ratio:.2f} %"),
        ("writes per 100 blocks", f"{result.writes_per_100:.1f}"),
        ("refused blocks", f"{result.refused:,}"),
        ("replayed blocks/s", f"{result.accesses_per_s:,.0f}"),
    ):
        table.add_row(title, text)
    Console().print(table)
