"""Gather the verbs of the `kvstrata` command."""

import os
import sys

import typer

from kvstrata.cli import (
    bench_engine,
    bench_fs,
    bench_manager,
    bench_object,
    bench_p2p,
    check,
    demo,
    fs,
    plan,
    replay,
    synthesize,
)
from kvstrata.core.errors import ConfigError

app = typer.Typer(
    help="Keep LLM KV blocks in host memory, files, object stores and peers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure one part, on this machine.", no_args_is_help=True)
app.command()(check.check)
app.command()(demo.demo)
app.command()(replay.replay)
app.command()(plan.plan)
app.command()(synthesize.synthesize)
app.add_typer(fs.app, name="fs")
app.add_typer(bench, name="bench")
bench.command()(bench_engine.engine)
bench.command()(bench_fs.fs)
bench.command()(bench_manager.manager)
bench.command()(bench_p2p.p2p)
bench.command("object")(bench_object.bench_object)


def main() -> None:
    """Run the command; a wrong setting is one line, not a traceback.

    Where nobody reads its output any more, as with `| head`, it ends quietly with status 1.
    """
    try:
        try:
            app()
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
        sys.exit(1)
