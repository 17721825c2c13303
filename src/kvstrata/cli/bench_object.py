"""`kvstrata bench object`: the object tier beside plain obstore loops."""

import json
from dataclasses import asdict
from importlib import import_module
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvstrata.core.errors import ConfigError
from kvstrata.core.settings import parse_bytes
from kvstrata.primary.region import HostRegion


def bench_object(
    *,
    url: Annotated[str, typer.Option(help="s3://BUCKET/PREFIX, gs://, az:// or file:///PATH.")],
    endpoint: Annotated[
        str | None, typer.Option(help="Of a store that is not the cloud's.")
    ] = None,
    region: Annotated[str | None, typer.Option(help="Of the bucket.")] = None,
    chunk_bytes: Annotated[str, typer.Option(help="Size of a chunk.")] = "2MiB",
    chunks: Annotated[int, typer.Option(min=1, help="Chunks in a round.")] = 64,
    requests: Annotated[int, typer.Option(min=1, help="Requests at one time.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians count.")] = 5,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Store and load chunks through the tier and through plain obstore loops, turn by turn.

    Credentials come from the environment, as the store's own tools read them.
    """
    size = parse_bytes(chunk_bytes, "--chunk-bytes")
    try:
        bench = import_module("kvstrata.tiers.object.bench")
    except ImportError as error:
        raise ConfigError("", str(error)) from error
    settings = {"url": url, "endpoint": endpoint, "region": region}
    region_of_chunks = HostRegion.create(chunks, size, shared=False)
    try:
        result = bench.run_bench(region_of_chunks, settings, rounds, requests)
    finally:
        region_of_chunks.close()
    found = asdict(result)
    if json_output:
        print(json.dumps(found))
        return
    table = Table(title=f"{chunks} chunks of {size:,} bytes, {requests} requests at one time")
    for title in ("", "tier", "plain obstore", "share"):
        table.add_column(title, justify="right")
    for name in ("store", "load"):
        ours, plain = found[f"{name}_GBps"], found[f"plain_{name}_GBps"]
        table.add_row(name, f"{ours:.2f} GB/s", f"{plain:.2f} GB/s", f"{ours / plain:.0%}")
    Console().print(table)
