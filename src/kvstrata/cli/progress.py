"""Show on the terminal how far something long is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def counting(what: str) -> Iterator[Callable[[int], None]]:
    """Give a function that takes the number done so far; shown on stderr, gone at the end."""
    columns = SpinnerColumn(), TextColumn("{task.completed:,.0f} " + what), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done: progress.update(task, completed=done)
