"""Plots the figures of a simulation as SVG: for each kind of time, the share of values up to it."""

from collections.abc import Mapping, Sequence
from typing import Final
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _LEFT, _TOP = 300, 200, 50, 30
_SHOWN: Final = 0.99
_COLORS: Final = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")

Curve = Sequence[tuple[float, float]]
"""Values in ascending order, seconds, each with the share of values up to it."""


def svg(curves: Mapping[str, Mapping[str, Curve]]) -> str:
    """Returns a drawing with a panel for each kind of time; ``curves`` are by name, then by kind.

    Time grows up to the 99th percentile of the slowest curve, so that a few stragglers do not flatten all.
    """
    names = list(curves)
    panels = [
        f'<g transform="translate({_LEFT + index * (_WIDTH + _LEFT)},{_TOP})">'
        f"{_panel(kind, [one[kind] for one in curves.values()])}</g>"
        for index, kind in enumerate(next(iter(curves.values())))
    ]
    legend = [
        f'<text x="{_LEFT}" y="{_TOP + _HEIGHT + 40 + 16 * row}" fill="{_color(row)}">{escape(name)}</text>'
        for row, name in enumerate(names)
    ]
    width, height = _LEFT + len(panels) * (_WIDTH + _LEFT), _TOP + _HEIGHT + 40 + 16 * len(names)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
        f' font-size="12"><rect width="{width}" height="{height}" fill="white"/>{"".join([*panels, *legend])}</svg>\n'
    )


def _panel(title: str, panel: Sequence[Curve]) -> str:
    most = max(next(value for value, share in curve if share >= _SHOWN) for curve in panel) or 1.0
    parts = [
        f'<text y="-10">{title}, seconds</text>',
        f'<path d="M0 0V{_HEIGHT}H{_WIDTH}" fill="none" stroke="black"/>',
    ]
    for tick in range(5):
        x, y, share = _WIDTH * tick / 4, _HEIGHT * (1 - tick / 4), tick / 4
        parts.append(f'<text x="{x}" y="{_HEIGHT + 16}" text-anchor="middle">{most * share:.3g}</text>')
        parts.append(f'<text x="-6" y="{y + 4}" text-anchor="end">{share:.0%}</text>')
    for row, curve in enumerate(panel):
        points = [(_WIDTH * value / most, _HEIGHT * (1 - share)) for value, share in curve if value <= most]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{_color(row)}"/>')
    return "".join(parts)


def _color(row: int) -> str:
    return _COLORS[row % len(_COLORS)]
