"""Draws a bench's line of JSON as SVG: ``python -m tests.bench.support.plot FILE.json > plot.svg``.

The plot has a background of its own and a second palette for dark pages, so it reads on both.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

WIDTH = 860
MARGIN = 20
PANEL_HEIGHT = 190
BARS_HEIGHT = 110
STYLE = """\
  <style>
    text { font: 12px system-ui, sans-serif; fill: #1f2328 }
    .title { font-size: 14px; font-weight: 600 }
    .value { font-size: 10px }
    .page { fill: #ffffff; stroke: #d0d7de }
    .axis { stroke: #8c959f }
    .s0 { fill: #9aa4af } .s1 { fill: #5f6b78 } .s2 { fill: #1f7a8c }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3 }
      .page { fill: #0d1117; stroke: #30363d }
      .s0 { fill: #6e7681 } .s1 { fill: #b1bac4 } .s2 { fill: #4cc2d6 }
    }
  </style>"""


@dataclass(frozen=True)
class Panel:
    """Groups of bars side by side, with one bar for each series."""

    title: str
    groups: Sequence[str]
    values: Mapping[str, Sequence[float | None]]
    """A value for each group, by series; `None` where nothing was measured."""
    logarithmic: bool = False


def vs_vllm(figures: Mapping[str, Any]) -> list[Panel]:
    """Returns panels with the throughput and both latencies of each load, and the start times."""
    contenders: Mapping[str, Mapping[str, float]] = figures["contenders"]
    loads = {"c1": "1 at a time", "c8": "8 at a time", "c32": "32 at a time", "long": "long prompts, 8"}

    def panel(title: str, names: Mapping[str, str], *, logarithmic: bool = False) -> Panel:
        # A quick run measures some of the loads.
        found = [name for name in names if any(name in measured for measured in contenders.values())]
        values = {
            contender: [measured.get(name) for name in found] for contender, measured in contenders.items()
        }
        return Panel(title, [names[name] for name in found], values, logarithmic)

    return [
        panel(
            "output tokens a second (more is better)", {f"tok_s_{load}": text for load, text in loads.items()}
        ),
        panel(
            "median time to first token, ms, logarithmic (less is better)",
            {f"ttft_{load}": text for load, text in loads.items()},
            logarithmic=True,
        ),
        panel(
            "median time per output token, ms (less is better)",
            {f"tpot_{load}": text for load, text in loads.items()},
        ),
        panel(
            "start to the first 200 of /health, s (less is better)",
            {"start_cold": "cold", "start_warm": "warm"},
        ),
    ]


def scheduler_step(figures: Mapping[str, Any]) -> list[Panel]:
    """Returns a panel with the time of a step by number of running requests."""
    sizes: Mapping[str, Mapping[str, Mapping[str, float]]] = figures["by_running"]
    values = {
        title: [step[key]["step_us"] for step in sizes.values()]
        for title, key in (("vLLM", "vllm"), ("triptych", "ours"))
    }
    title = "scheduling time of one decode step, µs, logarithmic (less is better)"
    return [Panel(title, [f"{int(size):,} running" for size in sizes], values, logarithmic=True)]


def gpu_decode(figures: Mapping[str, Any]) -> list[Panel]:
    """Returns a panel with a step's floor, its time in one process, and its time through the services."""
    series = {"floor": "floor_ms", "in-process": "step_ms", "through the services": "served_ms"}
    names = list(figures["step_ms"])
    values = {title: [figures[key].get(name) for name in names] for title, key in series.items()}
    # b8_c200: a batch of 8 behind 200 tokens of context each.
    groups = [name.removeprefix("b").replace("_c", " / ") for name in names]
    return [Panel("time of a decode step by batch / context in tokens, ms (less is better)", groups, values)]


PLOTS: Mapping[str, Callable[[Mapping[str, Any]], list[Panel]]] = {
    "vs_vllm": vs_vllm,
    "scheduler_step": scheduler_step,
    "gpu_decode": gpu_decode,
}


def draw(figures: Mapping[str, Any]) -> str:
    """Returns one bench's plot as an SVG document.

    Raises:
        ValueError: The bench has no plot.
    """
    bench = str(figures.get("bench"))
    if bench not in PLOTS:
        raise ValueError(f"no plot for the bench {bench!r}; there are plots for {', '.join(PLOTS)}")
    panels = PLOTS[bench](figures)
    where = f"{bench}; {figures['machine']}; {figures['day']}"
    height = 70 + PANEL_HEIGHT * len(panels)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(where)}">',
        STYLE,
        f'  <rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        *_legend(list(panels[0].values)),
    ]
    for index, panel in enumerate(panels):
        lines += _panel(panel, 50 + PANEL_HEIGHT * index)
    lines += [f'  <text class="value" x="{MARGIN}" y="{height - 12}">{escape(where)}</text>', "</svg>", ""]
    return "\n".join(lines)


def _legend(names: Sequence[str]) -> list[str]:
    lines, x = [], MARGIN
    for index, name in enumerate(names):
        lines.append(f'  <rect class="s{_shade(index, names)}" x="{x}" y="16" width="12" height="12"/>')
        lines.append(f'  <text x="{x + 18}" y="26">{escape(name)}</text>')
        x += 40 + 8 * len(name)
    return lines


def _shade(index: int, names: Sequence[str]) -> int:
    """Returns the colour's index; the last series is the plot's subject and has the strong colour."""
    return 2 if index == len(names) - 1 else index


def _panel(panel: Panel, top: int) -> list[str]:
    every = [value for values in panel.values.values() for value in values if value is not None]
    most = max(every)
    # The axis starts below the least value, so that the shortest bar is visible.
    least = 10 ** math.floor(math.log10(min(every)) - 0.3) if panel.logarithmic else 0.0
    base = top + 40 + BARS_HEIGHT
    group_width = (WIDTH - 2 * MARGIN) / len(panel.groups)
    bar_width = min(46.0, group_width * 0.8 / len(panel.values))
    lines = [f'  <text class="title" x="{MARGIN}" y="{top + 14}">{escape(panel.title)}</text>']
    for group, name in enumerate(panel.groups):
        left = MARGIN + group * group_width + (group_width - bar_width * len(panel.values)) / 2
        for index, (series, values) in enumerate(panel.values.items()):
            value = values[group]
            if value is None:
                continue
            share = math.log(value / least) / math.log(most / least) if panel.logarithmic else value / most
            size = max(1.0, BARS_HEIGHT * share)
            x = left + index * bar_width
            shade = _shade(index, list(panel.values))
            lines.append(
                f'  <rect class="s{shade}" x="{x:.1f}" y="{base - size:.1f}" width="{bar_width - 3:.1f}" height="{size:.1f}">'
                f"<title>{escape(f'{series}, {name}: {value:g}')}</title></rect>"
            )
            lines.append(
                f'  <text class="value" x="{x + (bar_width - 3) / 2:.1f}" y="{base - size - 3:.1f}" text-anchor="middle">'
                f"{_short(value)}</text>"
            )
        middle = MARGIN + (group + 0.5) * group_width
        lines.append(f'  <text x="{middle:.1f}" y="{base + 16}" text-anchor="middle">{escape(name)}</text>')
    lines.append(f'  <path class="axis" d="M{MARGIN} {base}H{WIDTH - MARGIN}"/>')
    return lines


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> int:
    """Prints the plot; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="the line of JSON that a bench printed last")
    try:
        print(draw(json.loads(parser.parse_args().file.read_text())), end="")
    except ValueError as error:
        print(f"plot: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
