"""`triptych plan`: turns a scheduler's histogram into flags."""

import json
from pathlib import Path

import pytest

from deploy import cli
from protos.service.settings import load
from scheduler_svc.settings import Settings
from scheduler_svc.shapes.batch_histogram import RecordedBatches, histogram_path

RECORDED = RecordedBatches("smollm2", (1, 2, 4, 8), {3: 1000, 5: 500, 8: 1})


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    RECORDED.write(histogram_path(tmp_path))
    return tmp_path


def test_the_table_compares_now_and_proposed(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two lines have the buckets, rows, padded rows and their share; the gain follows."""
    assert cli.main(["plan", "--state-dir", str(state_dir)]) == 0
    text = capsys.readouterr().out
    assert "1,501 decode steps, 3.7 rows each" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["now", "4", "8,008", "2,500", "31.2%", "1,2,4,8"] in lines
    assert ["proposed", "3", "5,508", "0", "0.0%", "3,5,8"] in lines
    assert "Expected: 31.2% fewer rows to run" in text


def test_the_flags_and_the_variables_are_what_the_scheduler_takes(
    state_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["plan", "--state-dir", str(state_dir), "--graphs", "3", "--max-batch", "9"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    [command] = [line for line in lines if line.startswith("triptych scheduler ")]
    by_flags = load(Settings, command.split()[2:])
    for line in lines[lines.index("or") + 1 :]:
        name, _, value = line.partition("=")
        monkeypatch.setenv(name, value)
    by_variables = load(Settings, [])
    for settings in (by_flags, by_variables):
        assert (settings.decode_bucket_strategy, settings.decode_buckets) == ("manual", (3, 5, 9))
        assert settings.max_num_seqs == 9


def test_prefill_buckets_are_planned_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They follow the tokens of chunks and line up with blocks; the flag is the scheduler's."""
    chunks = {70: 100, 90: 100, 300: 10, 512: 1}
    recorded = RecordedBatches("m", (1, 2), {1: 1}, (512,), chunks, 16)
    recorded.write(histogram_path(tmp_path))
    command = ["plan", "--state-dir", str(tmp_path), "--prefill-graphs", "3", "--json"]
    assert cli.main(command) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["prefill"]["now"]["tokens"] == 211 * 512
    assert plan["prefill"]["proposed"] == {
        "buckets": [96, 304, 512], "tokens": 200 * 96 + 10 * 304 + 512, "padded_tokens": 26 * 100 + 6 * 100 + 4 * 10,
        "padding_share": pytest.approx(3240 / 22752),
    }  # fmt: skip
    settings = load(Settings, plan["flags"])
    assert settings.chunk_sizes(settings.chunk(0), 16) == (96, 304, 512)
    assert cli.main(command[:-1]) == 0
    assert "211 prefill steps, 92.5 tokens each" in capsys.readouterr().out


def test_programs_get_json(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON has every figure of the table."""
    path = histogram_path(state_dir)
    assert cli.main(["plan", "--histogram", str(path), "--graphs", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["histogram"] == str(path)
    assert plan["now"] == {
        "buckets": [1, 2, 4, 8], "rows": 8008, "padded_rows": 2500, "padding_share": 2500 / 8008
    }  # fmt: skip
    assert plan["proposed"]["buckets"] == [3, 8]
    assert plan["gain"] == pytest.approx(1 - 7008 / 8008)
    assert plan["flags"] == ["--decode-bucket-strategy", "manual", "--decode-buckets", "3,8"]
    assert plan["environment"]["VLLM_RBLN_DECODE_BATCH_BUCKET_MANUAL_BUCKETS"] == "3,8"


def test_a_smaller_largest_batch_counts_larger_steps_as_that(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step with more rows than the new largest batch counts as a step of that batch."""
    assert cli.main(["plan", "--state-dir", str(state_dir), "--max-batch", "4", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["now"]["buckets"], plan["now"]["rows"]) == ([1, 2, 4], 1501 * 4)
    assert plan["proposed"]["buckets"] == [3, 4]


def test_the_best_buckets_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command proposes no flags when the current buckets are the best."""
    RecordedBatches("m", (3, 8), {3: 10}).write(histogram_path(tmp_path))
    assert cli.main(["plan", "--state-dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "already the best" in text
    assert "--decode-buckets" not in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist yet"),
        ("nonsense", "is not a histogram: Invalid JSON"),
        (json.dumps({"version": 1, "model": "m", "buckets": [1], "counts": {}}), "has no decode steps yet"),
    ],
)  # fmt: skip
def test_without_a_histogram_one_line_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    """The line names the file; the exit code is 1."""
    if content is not None:
        histogram_path(tmp_path).write_text(content)
    assert cli.main(["plan", "--state-dir", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert str(histogram_path(tmp_path)) in error
    assert error.count("\n") == 1


def test_the_state_folder_is_read_from_the_schedulers_variable(
    state_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a state folder one line says how to record a histogram."""
    monkeypatch.setenv("TRIPTYCH_STATE_DIR", str(state_dir))
    assert cli.main(["plan"]) == 0
    assert "smollm2" in capsys.readouterr().out
    monkeypatch.delenv("TRIPTYCH_STATE_DIR")
    assert cli.main(["plan"]) == 1
    assert capsys.readouterr().err.startswith("triptych plan: no state folder is set")


@pytest.mark.parametrize("flags", [["--graphs", "0"], ["--max-batch", "5000"], ["--graphs", "many"]])
def test_a_bad_number_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The message has the flag's name; the exit code is 2."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", *flags])
    assert stopped.value.code == 2
    assert flags[0] in capsys.readouterr().err
