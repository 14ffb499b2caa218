"""The replay's page: one HTML file, plots inside it as SVG, nothing loaded from elsewhere."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from connector.errors import ConfigError
from store_worker.replay.report import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#1f5fa8", "#c2571a", "#3c8d40", "#7b4fa3", "#8a8a8a")
WIDTH_IN, HEIGHT_IN = 7.2, 3.6


def check() -> None:
    """Raises ConfigError if plots can't be drawn here."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        hint = "install matplotlib (the extra `plots`), or leave --html out"
        raise ConfigError("html", str(error), "matplotlib", hint) from error


def page(trace: str, results: Sequence[Result]) -> str:
    """The whole page, for runs of one trace."""
    first = results[0]
    drawn = (
        (
            "Hit rate against capacity",
            "Share of the prompts' whole blocks that could be loaded, with all blocks before them."
            " The dashed line is what a store without a limit would reach.",
            hit_rate(results),
        ),
        (
            "Nodes per load",
            "How many nodes an engine talks to for one load: each one more is one more that can be"
            " slow or gone.",
            nodes_per_load(results),
        ),
        (
            "Load per node",
            "Blocks stored at the end and blocks read, by node; the dashed line is an even share."
            f" Run: {label(widest(results))}.",
            load_per_node(widest(results)),
        ),
    )
    sections = "\n".join(
        f"<section><h2>{html.escape(title)}</h2><p>{html.escape(text)}</p>{svg}</section>"
        for title, text, svg in drawn
    )
    facts = (
        f"{first.requests:,} requests of {first.sessions:,} sessions, {first.blocks_asked:,} blocks"
        f" of {first.setup.tokens_per_block} tokens asked for; {first.setup.nodes} node(s),"
        f" placement by {first.setup.placement}, end hints for {first.setup.end_hints:.0%} of the"
        " sessions."
    )
    return PAGE.format(
        title=html.escape(f"Replay of {trace}"), facts=html.escape(facts), sections=sections,
        table=numbers(results),
    )  # fmt: skip


def label(result: Result) -> str:
    """How a run is named in words."""
    return f"{result.setup.policy}, {result.setup.capacity_blocks:,} blocks"


def widest(results: Sequence[Result]) -> Result:
    """The first policy's run at the largest capacity."""
    policy = results[0].setup.policy
    runs = [result for result in results if result.setup.policy == policy]
    return max(runs, key=lambda result: result.setup.capacity_blocks)


def by_policy(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Runs of each policy, by capacity."""
    groups: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda r: r.setup.capacity_blocks):
        groups.setdefault(result.setup.policy, []).append(result)
    return {name: groups[name] for name in dict.fromkeys(r.setup.policy for r in results)}


# -- plots ---------------------------------------------------------------------------------------


def hit_rate(results: Sequence[Result]) -> str:
    """Usable hit rate over capacity, a line per policy."""

    def draw(axes: Axes) -> None:
        for colour, (name, runs) in zip(_colours(), by_policy(results).items(), strict=False):
            axes.plot(
                [run.setup.capacity_blocks for run in runs],
                [100 * run.usable_hit_rate for run in runs],
                marker="o", color=colour, label=name,
            )  # fmt: skip
        axes.axhline(100 * results[0].reusable_share, color="#999", linestyle="--", linewidth=1)
        _over_capacity(axes, results)
        axes.set_ylabel("usable hit rate, %")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)

    return svg("hit", draw)


def nodes_per_load(results: Sequence[Result]) -> str:
    """Mean over capacity, a line per policy, and the 99th percentile as a thin one."""

    def draw(axes: Axes) -> None:
        for colour, (name, runs) in zip(_colours(), by_policy(results).items(), strict=False):
            at = [run.setup.capacity_blocks for run in runs]
            means = [run.nodes_per_load.mean for run in runs]
            tails = [run.nodes_per_load.p99 for run in runs]
            axes.plot(at, means, marker="o", color=colour, label=f"{name}, mean")
            axes.plot(at, tails, color=colour, linewidth=1, linestyle=":", label=f"{name}, p99")
        _over_capacity(axes, results)
        axes.set_ylabel("nodes per load")
        axes.set_ylim(0, max(2, *(run.nodes_per_load.p99 for run in results)) * 1.1)
        axes.legend(frameon=False)

    return svg("nodes", draw)


def load_per_node(result: Result) -> str:
    """Two bars per node, each a share of all nodes', and a line where even bars would end."""

    def draw(axes: Axes) -> None:
        places = range(len(result.stored_per_node))
        for shift, values, colour, name in (
            (-0.2, result.stored_per_node, COLOURS[0], "stored"),
            (0.2, result.read_per_node, COLOURS[1], "read"),
        ):
            total = max(1, sum(values))
            shares = [100 * value / total for value in values]
            axes.bar([i + shift for i in places], shares, 0.4, color=colour, label=name)
        axes.axhline(100 / len(places), color="#999", linestyle="--", linewidth=1)
        axes.set_xticks(list(places))
        axes.set_xlabel("node")
        axes.set_ylabel("share of the blocks, %")
        axes.legend(frameon=False)

    return svg("load", draw)


def _colours() -> tuple[str, ...]:
    return COLOURS * 4


def _over_capacity(axes: Axes, results: Sequence[Result]) -> None:
    ticks = sorted({result.setup.capacity_blocks for result in results})
    if len(ticks) > 1:
        axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("capacity of all nodes, blocks")


def svg(name: str, draw: Callable[[Axes], None]) -> str:
    """One plot as an SVG element. name: keeps its ids apart from those of the page's others."""
    import matplotlib
    from matplotlib.figure import Figure

    rules: Any = {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif",
             "axes.spines.top": False, "axes.spines.right": False, "font.size": 10}  # fmt: skip
    with matplotlib.rc_context(rules):
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
        axes = figure.subplots()
        axes.grid(axis="y", color="#ddd", linewidth=0.8)
        axes.set_axisbelow(True)
        draw(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)


# -- text ----------------------------------------------------------------------------------------

COLUMNS: tuple[tuple[str, Callable[[Result], str]], ...] = (
    ("policy", lambda r: html.escape(r.setup.policy)),
    ("capacity", lambda r: f"{r.setup.capacity_blocks:,}"),
    ("hit rate", lambda r: f"{100 * r.usable_hit_rate:.2f} %"),
    ("behind a hole", lambda r: f"{r.blocks_behind_hole:,}"),
    ("written", lambda r: f"{r.blocks_written:,}"),
    ("declined", lambda r: f"{r.blocks_declined:,}"),
    ("evicted", lambda r: f"{r.evicted:,}"),
    ("nodes per load", lambda r: f"{r.nodes_per_load.mean:.2f}"),
    ("stored skew", lambda r: f"{r.stored_skew:.2f}"),
    ("read skew", lambda r: f"{r.read_skew:.2f}"),
    ("lost with a node", lambda r: f"{100 * r.hit_share_lost_on_node_loss.mean:.1f} %"),
)


def numbers(results: Sequence[Result]) -> str:
    """The table of all runs."""
    head = "".join(f"<th>{name}</th>" for name, _ in COLUMNS)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{cell(result)}</td>" for _, cell in COLUMNS) + "</tr>"
        for result in results
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>"


PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff }}
h1 {{ font-size: 1.6rem }}
h2 {{ font-size: 1.15rem; margin-bottom: 0 }}
section p {{ margin-top: .2rem; color: #555 }}
svg {{ max-width: 100%; height: auto }}
.wide {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem }}
th, td {{ padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #ddd }}
th:first-child, td:first-child {{ text-align: left }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{facts}</p>
{sections}
<section><h2>All numbers</h2><div class="wide">{table}</div></section>
</body>
</html>
"""
