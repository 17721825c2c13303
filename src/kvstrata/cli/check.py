"""`kvstrata check`: validate settings, print what they come to, try every tier."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from kvstrata.config_sources import load_config
from kvstrata.core.errors import ConfigError
from kvstrata.core.settings import parse_bytes
from kvstrata.primary.region import why_no_huge_pages
from kvstrata.self_check import Capacity, TierCheck, check_tiers, resolve_plan


def check(
    config: Annotated[Path, typer.Argument(help="TOML, JSON or YAML file with the settings.")],
    *,
    chunk_bytes: Annotated[
        str | None, typer.Option(help="Size of a chunk, such as 2MiB, if the file has none.")
    ] = None,
    plan_only: Annotated[bool, typer.Option("--plan-only", help="Try nothing out.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Validate settings, print the resolved plan, and store and load through every tier."""
    settings = load_config(config)
    size = settings.chunk_bytes
    if chunk_bytes is not None:
        size = parse_bytes(chunk_bytes, "--chunk-bytes")
    if size is None:
        raise ConfigError("chunk_bytes", "is required, in the file or as --chunk-bytes")
    plan = resolve_plan(settings, size)
    checks = [] if plan_only else list(check_tiers(settings, size))
    problem = why_no_huge_pages(shared=True) if settings.primary.huge_pages else "not asked for"
    if json_output:
        found = {"plan": list(map(asdict, plan)), "tiers": list(map(asdict, checks))}
        print(json.dumps(found | {"huge_pages": problem or "allowed"}))
    else:
        _print(plan, checks)
        if problem:
            print(f"no huge pages for memory that workers map: {problem} (docs/vllm.md)")
    if any(tier.problem for tier in checks):
        raise typer.Exit(1)


def _print(plan: list[Capacity], checks: list[TierCheck]) -> None:
    console = Console()
    table = Table(title="resolved plan", caption="bytes of the primary: rows rounded up to 4096")
    for title in ("tier", "chunks", "per rank", "this host", "tokens"):
        table.add_column(title, justify="left" if title == "tier" else "right")
    for tier in plan:
        table.add_row(
            tier.name,
            *(
                "unlimited" if value is None else f"{value:,}" if i in {0, 3} else decimal(value)
                for i, value in enumerate(
                    (tier.chunks, tier.rank_bytes, tier.host_bytes, tier.tokens)
                )
            ),
        )
    console.print(table)
    for check_ in checks:
        times = f" (store {check_.store_s:.3f} s, load {check_.load_s:.3f} s)"
        console.print(f"{check_.name}: {check_.verdict}{times if check_.store_s else ''}")
