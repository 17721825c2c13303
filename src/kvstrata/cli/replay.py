"""`kvstrata replay`: a request trace through the production manager."""

import dataclasses
import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvstrata.cli.progress import counting
from kvstrata.cli.trace_options import (
    AsJson,
    ChunkBytes,
    Group,
    HorizonSeconds,
    OrderOption,
    PartialOption,
    PrefillRate,
    Sessions,
    StepSeconds,
    TokensPerChunk,
    TracePath,
)
from kvstrata.config_sources import load_config
from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError
from kvstrata.core.settings import parse_bytes
from kvstrata.replay.report import TIER_TITLES, summary_rows, tier_rows, write_html, write_png
from kvstrata.replay.simulate import MODELLED_CHUNK_BYTES, Order, Partial, replay_primary
from kvstrata.replay.tiered import Assumptions, as_modelled, replay_config
from kvstrata.replay.trace import Interleaving, Trace, open_trace

ConfigPath = Annotated[
    Path | None, typer.Option(help="Settings with tiers, as for a manager; TOML, JSON, YAML.")
]
PolicyName = Annotated[
    str | None, typer.Option(help="Policy (default auto), or min for the offline bound.")
]
Share = Annotated[
    float | None, typer.Option(help="Places as a share of the trace's distinct blocks.")
]
Modelled = Annotated[
    bool, typer.Option("--modelled", help="Replace each tier by a model of the same capacity.")
]


def replay(
    trace: TracePath,
    *,
    policy: PolicyName = None,
    num_chunks: Annotated[int | None, typer.Option(min=1, help="Places in the primary.")] = None,
    share: Share = None,
    order: OrderOption = None,
    partial: PartialOption = None,
    sessions: Sessions = None,
    step_s: StepSeconds = 60.0,
    horizon_s: HorizonSeconds = None,
    group: Group = 1,
    tokens_per_chunk: TokensPerChunk = None,
    config: ConfigPath = None,
    modelled: Modelled = False,
    chunk_bytes: ChunkBytes = None,
    prefill_tokens_per_s: PrefillRate = None,
    put_price: Annotated[float, typer.Option(help="Of an object store's write.")] = 5e-6,
    get_price: Annotated[float, typer.Option(help="Of an object store's read.")] = 4e-7,
    html: Annotated[Path | None, typer.Option(help="With --config: write a page.")] = None,
    png: Annotated[Path | None, typer.Option(help="With --config: draw a picture.")] = None,
    json_output: AsJson = False,
) -> None:
    """Replay a trace, hours of it in seconds, and count what each tier hits and writes.

    With --num-chunks or --share: the primary alone, without bytes. With --config: the whole manager
    of these settings; tiers of type "modelled" move no bytes, others do for real.
    """
    source = open_trace(trace, Interleaving(sessions, step_s, horizon_s, group), tokens_per_chunk)
    if config is None:
        if html or png:
            raise ConfigError("replay", "--html and --png need --config")
        size = _num_chunks(source, num_chunks, share)
        found = _replay_primary(source, policy or "auto", size, order, partial)
    else:
        if any(option is not None for option in (policy, num_chunks, share, order)):
            raise ConfigError("replay", "with --config, sizes and policy stand in the file")
        settings = load_config(config)
        if chunk_bytes is not None:
            settings = dataclasses.replace(
                settings, chunk_bytes=parse_bytes(chunk_bytes, "--chunk-bytes")
            )
        rate = prefill_tokens_per_s or settings.prefill_tokens_per_s
        assumptions = Assumptions(rate, put_price, get_price)
        tiers = _Tiers.MODELLED if modelled else _Tiers.AS_THEY_ARE
        found = _replay_config(source, settings, tiers, assumptions, partial)
    title = f"{trace.name}: policy {found['policy']}, {found['num_chunks']:,} chunks"
    if html:
        write_html(html, title, found)
    if png:
        write_png(png, title, found)
    if json_output:
        print(json.dumps(found))
    else:
        _print(title, found)


class _Tiers(Enum):
    AS_THEY_ARE = "as they are"
    MODELLED = "modelled"


def _replay_primary(
    trace: Trace, policy: str, num_chunks: int, order: Order | None, partial: Partial | None
) -> Mapping[str, Any]:
    with counting("requests") as progress:
        return replay_primary(
            trace, policy, num_chunks, order=order, partial=partial, on_progress=progress
        ).as_json()


def _replay_config(
    trace: Trace,
    settings: Config,
    tiers: _Tiers,
    assumptions: Assumptions,
    partial: Partial | None,
) -> Mapping[str, Any]:
    chunk_bytes = settings.chunk_bytes or MODELLED_CHUNK_BYTES
    if tiers is _Tiers.MODELLED:
        settings = as_modelled(settings, chunk_bytes)
    with counting("requests") as progress:
        return replay_config(
            trace,
            settings,
            chunk_bytes,
            assumptions=assumptions,
            partial=partial or Partial.SKIP,
            on_progress=progress,
        )


def _num_chunks(trace: Trace, num_chunks: int | None, share: float | None) -> int:
    if (num_chunks is None) == (share is None):
        raise ConfigError("replay", "needs exactly one of --num-chunks, --share and --config")
    if num_chunks is not None:
        return num_chunks
    assert share is not None
    if share <= 0:
        raise ConfigError("replay", f"--share must be more than 0, is {share}")
    return max(1, round(share * trace.count_distinct()))


def _print(title: str, found: Mapping[str, Any]) -> None:
    console = Console()
    table = Table(title=title)
    table.add_column("")
    table.add_column("", justify="right")
    for name, text in summary_rows(found):
        table.add_row(name, text)
    console.print(table)
    if len(found["tiers"]) > 1:
        columns = Table(title="tiers")
        columns.add_column("")
        rows = list(tier_rows(found))
        for row in rows:
            columns.add_column(row[0], justify="right")
        for i, name in enumerate(TIER_TITLES[1:], start=1):
            columns.add_row(name, *(row[i] for row in rows))
        console.print(columns)
