"""`kvstrata fs`: look into the root of an fs tier, verify it, and clean it up."""

import json
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from kvstrata.core.settings import parse_bytes, parse_seconds
from kvstrata.core.tenants import TenantResolver
from kvstrata.tiers.fs.disk import FoundFile
from kvstrata.tiers.fs.root import FsRoot

app = typer.Typer(
    help="Look into the root of an fs tier, also while it is in use.", no_args_is_help=True
)

Root = Annotated[Path, typer.Argument(metavar="ROOT", help="The tier's `root` setting.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NEVER: Final = float("inf")


def _when(time_s: float) -> str:
    if time_s == NEVER:
        return "never"
    return datetime.fromtimestamp(time_s, UTC).isoformat(sep=" ", timespec="seconds")


@app.command("ls")
def ls(root: Root, *, json_output: Json = False) -> None:
    """List the chunks, the longest unused first."""
    with FsRoot(root) as opened:
        chunks = sorted(opened.chunks(), key=lambda found: found.stat.used_at_s)
    if json_output:
        for found in chunks:
            print(json.dumps(_as_json(found)))
        return
    for found in chunks:
        used, expires = _when(found.stat.used_at_s), _when(found.stat.expires_at_s)
        print(f"{found.stat.num_bytes:>12}  used {used}  expires {expires}  {found.path}")


def _as_json(found: FoundFile) -> dict[str, object]:
    expires_at_s = found.stat.expires_at_s
    return {
        "namespace": found.directory,
        "key": found.key.hex(),
        "bytes": found.stat.num_bytes,
        "used_at_s": found.stat.used_at_s,
        "expires_at_s": None if expires_at_s == NEVER else expires_at_s,
        "path": found.path,
    }


@app.command("stat")
def stat(root: Root, *, json_output: Json = False) -> None:
    """Show how much is there, by namespace, and whether the account agrees."""
    with FsRoot(root) as opened:
        totals = opened.totals()
    if json_output:
        print(json.dumps(asdict(totals)))
        return
    table = Table(title=str(root))
    for title in ("namespace", "chunks", "bytes"):
        table.add_column(title, justify="left" if title == "namespace" else "right")
    for name, (num_chunks, num_bytes) in sorted(totals.namespaces.items()):
        table.add_row(name, f"{num_chunks:,}", f"{num_bytes:,}")
    Console().print(table)
    print(f"on disk {totals.disk_bytes:,} bytes, account {totals.used_bytes:,} with reservations")
    print(f"processes using it: {totals.num_members}, temporaries: {totals.num_temporaries}")
    print(f"free on the file system: {totals.free_bytes:,} bytes")


@app.command("verify")
def verify(
    root: Root,
    *,
    remove: Annotated[bool, typer.Option(help="Remove what is damaged.")] = False,
) -> None:
    """Read every chunk and check key, length and checksums; exit with 1 if any is damaged."""
    damaged: set[str] = set()
    num_chunks = 0
    with FsRoot(root) as opened:
        for found in opened.chunks():
            num_chunks += 1
            if (problem := opened.problem_of(found)) is not None:
                damaged.add(found.path)
                print(f"{found.path}: {problem}")
        if remove:
            opened.collect(lambda found: found.path in damaged)
    print(f"{num_chunks} chunks, {len(damaged)} damaged{', removed' if remove and damaged else ''}")
    raise typer.Exit(1 if damaged else 0)


@app.command("gc")
def gc(
    root: Root,
    unused_for: Annotated[
        str | None, typer.Option(help='Remove chunks unused for this long, such as "7d".')
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option(help="Then remove the longest unused ones down to this size.")
    ] = None,
) -> None:
    """Remove expired chunks and what dead processes left; more on request."""
    now_s = time.time()
    oldest_s = -NEVER if unused_for is None else now_s - parse_seconds(unused_for, "--unused-for")

    def is_garbage(found: FoundFile) -> bool:
        return found.stat.expires_at_s <= now_s or found.stat.used_at_s < oldest_s

    with FsRoot(root) as opened:
        removed_bytes = opened.collect(is_garbage)
        if max_bytes is not None:
            removed_bytes += opened.trim(parse_bytes(max_bytes, "--max-bytes"))
    print(f"removed {removed_bytes:,} bytes")


@app.command("wipe")
def wipe(
    root: Root,
    namespace: Annotated[
        str | None, typer.Option(help="Only this one: by its name, or as `stat` names it.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's chunks.")] = None,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
) -> None:
    """Remove every chunk, or all of a namespace or tenant. Files that are not kvstrata's stay."""
    what = f"all chunks of {namespace}" if namespace else "all chunks"
    what += f" that are of tenant {tenant}" if tenant else ""
    if not yes:
        typer.confirm(f"Remove {what} below {root}?", abort=True)
    prefix = TenantResolver().tag_of(tenant) if tenant else b""
    with FsRoot(root) as opened:
        directories = opened.directories_of(namespace) if namespace else [None]
        removed_bytes = sum(opened.wipe(directory, prefix) for directory in directories)
    print(f"removed {removed_bytes:,} bytes")
