"""Reading the services' logs."""

import json
from pathlib import Path

from deploy.launcher.log_tail import LogTail, humanize, last_lines, progress


def test_a_structured_line_becomes_readable() -> None:
    """The event comes first, then its fields, then the traceback; fields that every line has are omitted."""
    line = json.dumps(
        {"event": "step failed", "level": "error", "slot": 3, "exception": "Traceback\nValueError: x"}
    )
    assert humanize(line).splitlines() == ["step failed slot=3", "Traceback", "ValueError: x"]


def test_other_lines_stay_as_they_are() -> None:
    """Output of libraries is shown unchanged, even if it starts like JSON."""
    for line in ("Segmentation fault", "{not json", "[1, 2]"):
        assert humanize(line) == line


def test_last_lines_of_a_missing_or_short_log(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    assert last_lines(log, 3) == []
    log.write_text("one\n\ntwo\n")
    assert last_lines(log, 3) == ["one", "two"]
    assert last_lines(log, 1) == ["two"]


def test_a_tail_yields_complete_lines_once(tmp_path: Path) -> None:
    """An incomplete line waits for its end, and no line comes twice."""
    log = tmp_path / "worker-0.log"
    tail = LogTail(log)
    assert list(tail.new_lines()) == []
    log.write_bytes(b"one\ntw")
    assert list(tail.new_lines()) == ["one"]
    with log.open("ab") as more:
        more.write(b"o\n")
    assert list(tail.new_lines()) == ["two"]
    assert list(tail.new_lines()) == []


def test_progress_becomes_readable_text() -> None:
    """A phase has its worker's address, and its counts if they are known; other lines give None."""

    def parsed(**entry: object) -> tuple[str, str] | None:
        return progress(json.dumps({"target": "127.0.0.1:7", **entry}))

    here = "127.0.0.1:7"
    warm_up = {"event": "progress", "phase": "warm_up", "done": 2, "total": 7, "message": "decode of 4 rows"}
    load = {"event": "progress", "phase": "load", "done": 0, "total": 0, "message": "weights"}
    assert parsed(**warm_up) == (here, "warm up 2/7 decode of 4 rows")
    assert parsed(**load) == (here, "load weights")
    assert parsed(event="ready", phase_seconds={"load": 1.26}) == (here, "ready (load 1.3 s)")
    assert parsed(event="registered") is None
    assert "-O 1" in (parsed(event="nothing_to_precompile", level=1, device="cpu") or ("", ""))[1]
    ignored = parsed(event="settings_ignored", names=["pool_batch_sizes"], reason="it generates")
    assert ignored == ("scheduler", "--pool-batch-sizes has no effect here: it generates")
    assert progress("noise") is None


def test_a_tail_starts_anew_when_the_log_was_rotated(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    log.write_text("one\ntwo\n")
    tail = LogTail(log)
    assert list(tail.new_lines()) == ["one", "two"]
    log.write_text("three\n")
    assert list(tail.new_lines()) == ["three"]
