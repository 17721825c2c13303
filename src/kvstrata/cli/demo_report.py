"""Show what the demo measured: a table, a chart as PNG, one HTML file, one JSON object."""

import base64
import html
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from kvstrata.cli.demo_run import DemoResult
from kvstrata.engine.demo_workload import TurnCost

COLORS = {"engine": "#8c8c8c", "primary": "#2a7f62", "fs": "#3d6fb4", "computed": "#d1603d"}
HEAD = ("turn", "recomputed", "offloaded", "faster")


@dataclass(frozen=True, slots=True)
class Round:
    """The same turn of all conversations: medians of times, sums of tokens."""

    title: str
    ttft_compute_s: float
    ttft_offload_s: float
    tokens: dict[str, int]


def is_identical(result: DemoResult) -> bool:
    """Say whether every token is the one that was generated without offloading."""
    expected = {(cost.title, cost.turn): cost.answer for cost in result.computed}
    found = {(cost.title, cost.turn): cost.answer for cost in (*result.offloaded, *result.late)}
    return expected == found


def summary(result: DemoResult) -> dict[str, Any]:
    """Return what `--json` prints; times are medians over returning turns, None where none were."""
    late = [cost for cost in result.late if cost.tokens.get("fs")]
    return {
        "identical": is_identical(result),
        "ttft_compute_s": _median(c.ttft_s for c in result.computed if c.turn),
        "ttft_primary_s": _median(c.ttft_s for c in result.offloaded if c.turn),
        "ttft_fs_s": _median(c.ttft_s for c in late),
        "tokens": _add_tokens((*result.offloaded, *result.late)),
        "bytes": result.moved_bytes,
        "model": result.model,
    }


def rounds(result: DemoResult) -> list[Round]:
    """Return the turns in order, each over all conversations."""
    costs = [*result.offloaded, *result.late]
    compute_s = {(cost.title, cost.turn): cost.ttft_s for cost in result.computed}
    found = []
    for turn in sorted({cost.turn for cost in costs}):
        same = [cost for cost in costs if cost.turn == turn]
        is_late = turn >= result.plan.num_turns
        found.append(
            Round(
                f"{turn + 1}" + (", process 2" if is_late else ""),
                median(compute_s[cost.title, turn] for cost in same),
                median(cost.ttft_s for cost in same),
                _add_tokens(same),
            )
        )
    return found


def make_table(result: DemoResult) -> Table:
    """Return the table: a row per turn."""
    sources = list(_add_tokens((*result.offloaded, *result.late)))
    table = Table(
        title=f"{result.model}: time to first token, and the source of prompt tokens",
        box=None,  # so that it fits into 80 columns
        pad_edge=False,
    )
    for name in (*HEAD, *sources):
        table.add_column(name, justify="left" if name == HEAD[0] else "right", no_wrap=True)
    for row in rounds(result):
        table.add_row(*_cells(row, sources))
    return table


def draw_chart(result: DemoResult) -> bytes | None:
    """Return the chart as PNG; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        return None
    turns = rounds(result)
    names = [f"turn {row.title}".replace(", ", "\n") for row in turns]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    times, tokens = figure.subplots(1, 2)
    places = range(len(turns))
    times.bar([p - 0.2 for p in places], [r.ttft_compute_s for r in turns], 0.4,
              label="recomputed", color=COLORS["computed"])  # fmt: skip
    bars = times.bar([p + 0.2 for p in places], [r.ttft_offload_s for r in turns], 0.4,
                     label="offloaded", color=COLORS["primary"])  # fmt: skip
    times.bar_label(bars, [f"{r.ttft_compute_s / r.ttft_offload_s:.1f}x" for r in turns])
    times.set(title="Time to first token, median", ylabel="seconds")
    below = [0] * len(turns)
    for source in _add_tokens((*result.offloaded, *result.late)):
        counts = [row.tokens.get(source, 0) for row in turns]
        tokens.bar(names, counts, 0.6, bottom=below, label=source, color=COLORS.get(source))
        below = [a + b for a, b in zip(below, counts, strict=True)]
    tokens.set(title="Prompt tokens by source", ylabel="tokens")
    for axes in (times, tokens):
        axes.set_xticks(list(places), names)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4)
    figure.suptitle(f"kvstrata demo: {result.model}")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    return image.getvalue()


def make_html(result: DemoResult, chart: bytes | None) -> str:
    """Return one self-contained page with chart and table."""
    sources = list(_add_tokens((*result.offloaded, *result.late)))
    head = [*HEAD, *sources]
    rows = [_cells(row, sources) for row in rounds(result)]
    image = base64.b64encode(chart).decode() if chart else ""
    figure = f'<img alt="chart" src="data:image/png;base64,{image}">' if chart else ""
    verdict = "Every generated token is" if is_identical(result) else "NOT every token is"
    moved = ", ".join(f"{n} {size / 1e6:,.1f} MB" for n, size in result.moved_bytes.items())
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>kvstrata demo</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto }}
img {{ max-width: 100% }}
td, th {{ padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd }}
td:first-child {{ text-align: left }}
</style>
<h1>kvstrata demo</h1>
<p>{html.escape(result.model)}, {result.plan.num_conversations} conversations over documents of
{result.plan.num_document_tokens} tokens. {verdict} the one generated without offloading.</p>
{figure}
<table>
<caption>Time to first token (median), and prompt tokens by source</caption>
{_html_row(head, "th")}{"".join(_html_row(row, "td") for row in rows)}</table>
<p>Moved: {html.escape(moved)}.</p>
</html>
"""


def write_files(result: DemoResult, folder: Path) -> list[Path]:
    """Write chart and page into a folder; return what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    chart = draw_chart(result)
    page = folder / "kvstrata-demo.html"
    page.write_text(make_html(result, chart), encoding="utf-8")
    if chart is None:
        return [page]
    image = folder / "kvstrata-demo.png"
    image.write_bytes(chart)
    return [image, page]


def _cells(row: Round, sources: Sequence[str]) -> list[str]:
    return [
        row.title,
        f"{row.ttft_compute_s * 1e3:,.0f} ms",
        f"{row.ttft_offload_s * 1e3:,.0f} ms",
        f"{row.ttft_compute_s / row.ttft_offload_s:.1f}x",
        *(f"{row.tokens.get(source, 0):,}" for source in sources),
    ]


def _html_row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None


def _add_tokens(costs: Iterable[TurnCost]) -> dict[str, int]:
    total = {"engine": 0, "primary": 0, "fs": 0, "computed": 0}
    for cost in costs:
        for source, count in cost.tokens.items():
            total[source] = total.get(source, 0) + count
    return total
