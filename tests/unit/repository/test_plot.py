"""The plots of the benches."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.bench.support.plot import PLOTS, draw
from tests.support.paths import ROOT

DATA = sorted((ROOT / "docs" / "data").glob("*.json"))


@pytest.mark.parametrize("file", DATA, ids=lambda file: file.stem)
def test_a_plot_shows_every_figure(file: Path) -> None:
    """A plot has one bar for each figure, with the machine and the day below."""
    figures = json.loads(file.read_text())
    svg = draw(figures)
    ET.fromstring(svg)  # noqa: S314 - our own document
    panels = PLOTS[figures["bench"]](figures)
    bars = sum(value is not None for panel in panels for values in panel.values.values() for value in values)
    assert len(re.findall("<title>", svg)) == bars
    assert figures["machine"] in svg
    assert figures["day"] in svg


def test_a_missing_figure_has_no_bar() -> None:
    """A quick run measures only one load, so a plot may lack bars."""
    contenders = {"vLLM": {"tok_s_c8": 2.0, "ttft_c8": 2.0, "tpot_c8": 2.0, "start_cold": 2.0}}
    figures = {"bench": "vs_vllm", "machine": "m", "day": "d", "contenders": contenders}
    assert draw(figures).count("<title>") == 4


def test_a_bench_without_a_plot_is_named() -> None:
    """The error lists the benches that have one."""
    with pytest.raises(ValueError, match=r"no plot for the bench 'fleet'.*vs_vllm"):
        draw({"bench": "fleet"})
