"""The histogram of batch sizes is counted, logged and kept; a broken file stops nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import LogCapture

from scheduler_svc.shapes.batch_histogram import (
    BatchHistogram,
    DamagedHistogram,
    RecordedBatches,
    histogram_path,
)
from scheduler_svc.shapes.shape_config import ShapeConfig


class Rig:
    """A histogram with a clock set by hand and a captured log."""

    def __init__(self, path: Path | None, interval_s: float | None = 10.0) -> None:
        self.now = 0.0
        capture = LogCapture()
        self.lines: list[dict[str, Any]] = capture.entries  # type: ignore[assignment]
        log = structlog.wrap_logger(
            None, processors=[capture], wrapper_class=structlog.make_filtering_bound_logger("info")
        )
        self.histogram = BatchHistogram(path, interval_s, lambda: self.now, log)

    def describe(self, model: str, *buckets: int) -> None:
        shapes = ShapeConfig(64, buckets[-1], 8, 16, buckets, prefill_buckets=(4, 8))
        self.histogram.describe(model, shapes)

    def run(self, steps: dict[int, int]) -> None:
        for rows, number in steps.items():
            for _ in range(number):
                self.histogram.observe(rows)

    def tick(self, now: float) -> None:
        self.now = now
        self.histogram.tick()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return histogram_path(tmp_path / "state")


def test_each_interval_logs_one_line() -> None:
    """The line has counts by rows, steps, mean and padding; an interval without steps has none."""
    rig = Rig(None)
    rig.describe("m", 1, 4, 8)
    rig.run({1: 2, 3: 6})
    rig.tick(9.9)
    assert rig.lines == []
    rig.tick(10.0)
    rig.run({600: 1})
    rig.describe("m", 1, 600)
    rig.tick(25.0)
    rig.tick(40.0)
    first, second = rig.lines
    assert first == {
        "event": "decode_batch_sizes", "log_level": "info", "steps": 8, "mean_rows": 2.5,
        "padding_share": round(6 / 26, 4), "steps_by_rows": {"1": 2, "3": 6},
    }  # fmt: skip
    assert second["steps_by_rows"] == {"600": 1}


@pytest.mark.parametrize("interval", [None, 0.0, -1.0])
def test_without_an_interval_the_file_is_saved_every_minute(path: Path, interval: float | None) -> None:
    """Nothing is logged."""
    rig = Rig(path, interval)
    rig.run({2: 1})
    rig.tick(59.0)
    assert not path.exists()
    rig.tick(60.0)
    assert RecordedBatches.read(path).counts == {2: 1}
    assert rig.lines == []


def test_the_counts_survive_restarts(path: Path) -> None:
    """Each process adds its own counts once, however often it saves."""
    rigs = []
    for _ in range(3):
        rigs.append(rig := Rig(path))
        rig.describe("m", 1, 4)
        rig.run({1: 1, 4: 2})
        rig.histogram.observe_chunk(7)
        rig.tick(100.0)
        rig.histogram.save()
    assert RecordedBatches.read(path) == RecordedBatches("m", (1, 4), {1: 3, 4: 6}, (4, 8), {7: 3}, 16)
    assert [rig.histogram.counts[4] for rig in rigs] == [2, 4, 6]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_file_of_an_earlier_release_has_no_chunks(path: Path) -> None:
    """Its decode steps count on."""
    path.parent.mkdir()
    path.write_text(json.dumps(GOOD))
    assert RecordedBatches.read(path) == RecordedBatches("m", (1, 2), {1: 5})


def test_a_process_that_ran_nothing_changes_nothing(path: Path) -> None:
    """It does not even create the folder."""
    Rig(path).histogram.save()
    assert not path.parent.exists()
    RecordedBatches("m", (4,), {3: 1}).write(path)
    rig = Rig(path)
    rig.histogram.save()
    assert RecordedBatches.read(path) == RecordedBatches("m", (4,), {3: 1})


def test_the_file_of_another_model_is_renamed(path: Path) -> None:
    """Its counts do not apply to this model."""
    RecordedBatches("old", (4,), {3: 1}).write(path)
    rig = Rig(path)
    rig.describe("new", 2)
    rig.run({2: 5})
    rig.histogram.save()
    assert RecordedBatches.read(path) == RecordedBatches("new", (2,), {2: 5}, (4, 8), {}, 16)
    aside = path.with_name(path.name + ".previous")
    assert RecordedBatches.read(aside).model == "old"
    assert rig.lines[0]["log_level"] == "warning"


GOOD = {"version": 1, "model": "m", "buckets": [1, 2], "counts": {"1": 5}}


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "\x00\xff", "[" * 100_000, "[]", "{}",
        json.dumps({**GOOD, "version": 2}), json.dumps({**GOOD, "model": None}), json.dumps({**GOOD, "counts": [1]}),
        json.dumps({**GOOD, "counts": {"one": 1}}), json.dumps({**GOOD, "counts": {"9" * 5000: 1}}),
        json.dumps({**GOOD, "counts": {"1": -5}}), json.dumps({**GOOD, "counts": {"1": 1.5}}),
        json.dumps({**GOOD, "counts": {"0": 1}}), json.dumps({**GOOD, "buckets": [2, 1]}),
        json.dumps({**GOOD, "prefill": 1}), json.dumps({**GOOD, "prefill": {"buckets": [4], "counts": {"3": 1}}}),
        json.dumps({**GOOD, "prefill": {"buckets": [8, 4], "counts": {}, "block_size": 16}}),
        json.dumps({**GOOD, "buckets": ["1"]}), json.dumps({**GOOD, "buckets": [True]}),
    ],
)  # fmt: skip
def test_a_damaged_file_is_renamed(path: Path, text: str) -> None:
    """It causes one warning, and counting starts again."""
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(DamagedHistogram):
        RecordedBatches.read(path)
    rig = Rig(path)
    assert [line["log_level"] for line in rig.lines] == ["warning"]
    assert path.with_name(path.name + ".damaged").read_text() == text
    rig.run({1: 1})
    rig.histogram.save()
    assert RecordedBatches.read(path).counts == {1: 1}


def test_an_unwritable_folder_causes_one_warning(tmp_path: Path) -> None:
    """Later attempts are silent; once the folder is writable, the file is saved."""
    blocked = tmp_path / "state"
    blocked.touch()
    rig = Rig(histogram_path(blocked))
    before = len(rig.lines)
    rig.run({1: 1})
    rig.histogram.save()
    rig.histogram.save()
    warnings = [line["event"] for line in rig.lines[before:]]
    assert warnings == ["batch_sizes_not_saved"]
    blocked.unlink()
    rig.histogram.save()
    assert RecordedBatches.read(histogram_path(blocked)).counts == {1: 1}
