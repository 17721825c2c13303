"""`kvstrata demo`: offloading at work, on a real model and any machine."""

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvstrata.cli.demo_report import is_identical, make_table, summary, write_files
from kvstrata.cli.demo_run import DemoModel, DemoPlan, DemoResult, load_model, run_demo

PHASES = {
    "computed": "without offloading",
    "offloaded": "with offloading",
    "late": "new process, same files",
}


def demo(
    *,
    conversations: Annotated[int, typer.Option(min=1, max=9, help="Conversations.")] = 3,
    tokens: Annotated[int, typer.Option(min=64, max=1900, help="Tokens a document.")] = 1536,
    turns: Annotated[int, typer.Option(min=2, help="Turns in the first process.")] = 3,
    root: Annotated[Path | None, typer.Option(help="Directory of the fs tier.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where chart and page go.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Hold conversations with and without offloading, and compare.

    The conversations do not fit into the engine's own blocks together. Without offloading, what was
    pushed out is computed again at the next turn; with it, it comes back from host memory, and in a
    second process from files.
    """
    console = Console(stderr=json_output)
    with ExitStack() as stack:
        if root is None:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstrata-demo-")))
        plan = DemoPlan(
            num_conversations=conversations,
            num_document_tokens=tokens,
            num_turns=turns,
            num_late_turns=1,
            num_answer_tokens=8,
            share_of_engine=0.4,
            root=root,
        )
        with console.status("Loading the model"):
            model = load_model()
        if model.name == "tiny":
            console.print(
                "SmolLM2 is not installed (make model): showing a tiny model with random weights. "
                "The mechanism is the same; times say little."
            )
        result = _run(model, plan, console)
    if json_output:
        print(json.dumps(summary(result)))
        if out is not None:
            write_files(result, out)
        return
    _print(result, console, out or Path())


def _run(model: DemoModel, plan: DemoPlan, console: Console) -> DemoResult:
    """Run with a bar for each phase."""
    turns = {
        "computed": plan.num_turns + plan.num_late_turns,
        "offloaded": plan.num_turns,
        "late": plan.num_late_turns,
    }
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}"),
    )
    result = DemoResult(model.name, plan)
    with Progress(*columns, console=console) as progress:
        tasks = {
            phase: progress.add_task(
                PHASES[phase], total=count * plan.num_conversations, last="", start=False
            )
            for phase, count in turns.items()
        }
        progress.start_task(tasks["computed"])
        for phase, cost, so_far in run_demo(model, plan):
            result = so_far
            progress.start_task(tasks[phase])
            last = f"{cost.title}: {cost.ttft_s:.2f} s"
            progress.update(tasks[phase], advance=1, last=last)
    return result


def _print(result: DemoResult, console: Console, out: Path) -> None:
    console.print(make_table(result))
    moved = ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in result.moved_bytes.items())
    console.print(f"moved: {moved}")
    paths = write_files(result, out)
    console.print("written: " + ", ".join(str(path) for path in paths))
    if is_identical(result):
        console.print("[green]Every generated token equals the run without offloading.[/green]")
        return
    console.print("[red]Tokens differ from the run without offloading.[/red]")
    raise typer.Exit(code=1)
