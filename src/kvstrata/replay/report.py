"""Show what a replay counted: one self-contained HTML page, or a picture."""

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from kvstrata.core.errors import ConfigError

Found = Mapping[str, Any]

_COLOURS: Final = ("#3b6fb5", "#e08a2e", "#4d9a57", "#8b5fa8", "#b8504a", "#6b7280")
_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem;
  color: #1f2937 }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { padding: .2rem .8rem; border-bottom: 1px solid #e5e7eb; text-align: right }
td:first-child, th:first-child { text-align: left }
svg { width: 100%; height: auto; background: #f9fafb } .key { padding: 0 .5rem; color: white }
"""


def media_of(found: Found) -> list[str]:
    """Return the media in which chunks were, the primary first."""
    return list(found["tiers"])


def summary_rows(found: Found) -> Iterator[tuple[str, str]]:
    """Yield what is worth a line: title and text."""
    yield "requests", f"{found['requests']:,}"
    yield "blocks", f"{found['blocks']:,}"
    yield "trace time", f"{found['seconds']:,.0f} s"
    yield "hits", f"{found['hits']:,}"
    yield "hit ratio", f"{100 * found['hit_ratio']:.2f} %"
    yield "hit ratio by tokens", f"{100 * found['token_hit_ratio']:.2f} %"
    yield "writes per 100 blocks", f"{found['writes_per_100']:.1f}"
    yield "refused blocks", f"{found['refused']:,}"
    yield "replayed blocks/s", f"{found['accesses_per_s']:,.0f}"
    ttft = found.get("ttft", {})
    if "saved_s" in ttft:
        rate = f"at {ttft['prefill_tokens_per_s']:,.0f} tokens/s"
        yield f"prefill per request without hits, {rate}", f"{ttft['without_s']:.3f} s"
        yield "saved of that, waits taken off", f"{ttft['saved_s']:.3f} s"
    if ttft.get("num_waits"):
        yield "requests that waited for tiers", f"{ttft['num_waits']:,}"
        yield "longest wait", f"{ttft['wait_max_s']:.3f} s"


TIER_TITLES: Final = (
    *("tier", "hits", "% of blocks", "hit tokens", "written", "read", "written/day"),
    *("drive writes/day", "evicted", "unused when evicted (median)", "refused or dropped"),
    "store requests",
)


def tier_rows(found: Found) -> Iterator[list[str]]:
    """Yield one row a medium, under `TIER_TITLES`."""
    for name, tier in found["tiers"].items():
        num_lost = tier.get("refused", 0) + tier.get("dropped", 0)
        requests = ""
        if "request_cost" in tier:
            num = tier["put_requests"] + tier["get_requests"]
            requests = f"{num:,.0f} for {tier['request_cost']:.2f}"
        yield [
            name,
            f"{tier['hits']:,}",
            f"{100 * tier['hits'] / max(1, found['blocks']):.2f}",
            f"{tier.get('hit_tokens', 0):,}",
            size_text(tier.get("written_bytes", 0)),
            size_text(tier.get("read_bytes", 0)),
            size_text(tier["written_bytes_per_day"]) if "written_bytes_per_day" in tier else "",
            f"{tier['drive_writes_per_day']:.2f}" if tier.get("drive_writes_per_day") else "",
            f"{tier.get('evicted', 0):,.0f}",
            _median_age(tier.get("eviction_ages", {})),
            f"{num_lost:,.0f}",
            requests,
        ]


def _median_age(ages: Mapping[str, int]) -> str:
    num_left = sum(ages.values()) / 2
    for name, num in ages.items():
        num_left -= num
        if num_left <= 0:
            return name
    return ""


def size_text(num_bytes: float) -> str:
    """Write a size with its binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.0f} {unit}" if unit == "B" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"


def write_html(path: Path, title: str, found: Found) -> None:
    """Write one page that needs nothing else: tables, a timeline, and all numbers as JSON."""
    summary = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td></tr>"
        for name, text in summary_rows(found)
    )
    keys = "".join(
        f'<span class="key" style="background:{_colour(i)}">{html.escape(name)}</span> '
        for i, name in enumerate(media_of(found))
    )
    data = json.dumps(found).replace("<", "\\u003c")
    path.write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1><table>{summary}</table>"
        f"<h2>Tiers</h2>{_html_table(TIER_TITLES, tier_rows(found))}"
        f"<h2>Hits over time, per cent of blocks</h2><p>{keys}</p>{_svg(found)}"
        f'<script type="application/json" id="replay">{data}</script></html>\n',
        encoding="utf-8",
    )


def _html_table(titles: Sequence[str], rows: Iterator[list[str]]) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _shares(found: Found, medium: str) -> list[float]:
    """Return per stretch of the timeline the per cent of blocks that were hit in a medium."""
    return [
        100 * row.get(f"hits.{medium}", 0) / max(1, row.get("blocks", 0))
        for row in found["timeline"]
    ]


def _svg(found: Found) -> str:
    """Draw stacked bars, one a stretch of the timeline."""
    rows, bars = found["timeline"], []
    width = 1000 / max(1, len(rows))
    tops = [0.0] * len(rows)
    for i, medium in enumerate(media_of(found)):
        for x, share in enumerate(_shares(found, medium)):
            tops[x] += share
            bars.append(
                f'<rect x="{x * width:.1f}" y="{300 - 3 * tops[x]:.1f}" width="{width * 0.9:.1f}" '
                f'height="{3 * share:.1f}" fill="{_colour(i)}"/>'
            )
    lines = "".join(
        f'<line x1="0" x2="1000" y1="{300 - 3 * y}" y2="{300 - 3 * y}" stroke="#d1d5db"/>'
        f'<text x="4" y="{296 - 3 * y}" font-size="12" fill="#6b7280">{y} %</text>'
        for y in (25, 50, 75)
    )
    return f'<svg viewBox="0 0 1000 300" role="img">{"".join(bars)}{lines}</svg>'


def write_png(path: Path, title: str, found: Found) -> None:
    """Draw hits over time and the bytes that each tier read and wrote.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        figure = import_module("matplotlib.figure").Figure(figsize=(10, 7), layout="constrained")
    except ImportError as error:
        raise ConfigError("--png", "needs matplotlib: install kvstrata[plots]") from error
    over_time, in_bytes = figure.subplots(2, 1, height_ratios=(2, 1))
    times_s = [row["at_s"] for row in found["timeline"]]
    media = media_of(found)
    over_time.stackplot(
        times_s, *(_shares(found, medium) for medium in media), labels=media, colors=_COLOURS
    )
    over_time.set(title=title, xlabel="trace time, s", ylabel="hits, % of blocks", ylim=(0, 100))
    over_time.legend(loc="upper left")
    for shift, name in ((-0.2, "written_bytes"), (0.2, "read_bytes")):
        sizes = [found["tiers"][medium].get(name, 0) / 2**30 for medium in media]
        places = [i + shift for i in range(len(media))]
        in_bytes.barh(places, sizes, height=0.36, label=name.replace("_bytes", ""))
    in_bytes.set(yticks=range(len(media)), yticklabels=media, xlabel="GiB")
    in_bytes.legend()
    figure.savefig(path, dpi=110)
