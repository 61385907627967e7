"""`triptych simulate`."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar
from xml.etree import ElementTree as ET

import pytest

from deploy import cli

TRACE = "".join(
    json.dumps({"arrival_s": index * 0.5, "prompt_tokens": 8, "output_tokens": 4, "tenant": "ab"[index % 2]}) + "\n"
    for index in range(40)
)  # fmt: skip
SIZES = ["--max-num-seqs", "2", "--max-num-batched-tokens", "8", "--block-size", "8"]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """A trace, and step times of 10 ms a token."""
    (tmp_path / "trace.jsonl").write_text(TRACE)
    (tmp_path / "times.json").write_text('{"per_token_s": 0.01}')
    return ["--trace", str(tmp_path / "trace.jsonl"), "--step-times", str(tmp_path / "times.json"), *SIZES]


def simulated(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "figures.json"
    assert cli.main(["simulate", *arguments, "--json", str(path)]) == 0
    figures: dict[str, Any] = json.loads(path.read_text())
    return figures


def test_the_table_and_the_json_have_the_same_figures(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = simulated(tmp_path, *files, "--replicas", "2")
    assert figures["ttft_s"]["p50"] == pytest.approx(0.08)
    assert figures["gap_s"]["mean"] == pytest.approx(0.01)
    assert figures["latency_s"]["p99"] == pytest.approx(0.11)
    assert sum(figures["requests_by_replica"]) == 40
    assert set(figures["tenants"]) == {"a", "b"}
    assert figures["tenants"]["a"].keys() < figures.keys()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:4] == ["all", "40", "0", "80.0"]
    assert [line.split()[0] for line in lines[2:4]] == ["a", "b"]


def test_find_rate_ends_where_the_limit_breaks(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One worker has two slots; a request takes 80 ms of chunks and at most 40 ms of decode steps."""
    figures = simulated(tmp_path, *files, "--find", "rate", "--ttft-p99", "300ms")
    assert 6 < figures["rate"] < 14
    assert 0.15 < figures["ttft_s"]["p99"] <= 0.3
    assert "40 requests last 4 s" in capsys.readouterr().err
    twice = simulated(tmp_path, *files, "--find", "rate", "--ttft-p99", "300ms", "--replicas", "2")
    assert twice["rate"] > 1.6 * figures["rate"]


def test_sweeps_are_combined(files: list[str], tmp_path: Path) -> None:
    figures = simulated(tmp_path, *files, "--sweep", "replicas=1,2", "--sweep", "max-num-seqs=1,2")
    settings = [run["settings"] for run in figures["sweep"]]
    assert settings == [
        {"replicas": replicas, "max-num-seqs": slots} for replicas in "12" for slots in "12"
    ]  # fmt: skip
    assert [len(run["requests_by_replica"]) for run in figures["sweep"]] == [1, 1, 2, 2]


def test_a_sweep_of_lists_separates_them_by_semicolons(files: list[str], tmp_path: Path) -> None:
    figures = simulated(tmp_path, *files, "--sweep", "tenant-weights=a=1,b=2;a=2,b=1")
    assert [run["settings"] for run in figures["sweep"]] == [
        {"tenant-weights": weights} for weights in ("a=1,b=2", "a=2,b=1")
    ]


@pytest.mark.parametrize("kind", ["random", "conversations", "agents"])
def test_made_requests_share_what_their_kind_shares(kind: str, tmp_path: Path) -> None:
    figures = simulated(
        tmp_path, "--generate", kind, "--requests", "60", "--rate", "2", "--step-times", "h100-8b",
        "--output-tokens", "20",
    )  # fmt: skip
    assert figures["requests"] == 60
    assert (figures["prefix_hit_share"] > 0.3) == (kind != "random")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "give --step-times a file or one of "),
        (["--step-times", "none"], "--step-times none: No such file or directory; name a file or one of "),
        (["--step-times", "../profiles/h100-8b"], "No such file or directory"),
        (["--step-times", "{}"], "steps take no time"),
        (["--step-times", '{"base": 1}'], "base: Extra inputs are not permitted"),
        (["--step-times", "h100-8b"], "give --trace a file, or --generate one of random, "),
        (["--step-times", "h100-8b", "--trace", "none"], "--trace none: No such file or directory"),
        (["--step-times", "h100-8b", "--trace", "x", "--rate", "2"], "--rate is for --generate"),
        (["--step-times", "h100-8b", "--generate", "random", "--find", "rate"], "needs a limit, such as --ttft-p99 1s"),
        (["--step-times", "h100-8b", "--generate", "random", "--ttft-p99", "1s"], "are for --find rate"),
        (["--step-times", "h100-8b", "--generate", "random", "--sweep", "slots=1"], "unrecognized arguments: --slots"),
        (["--step-times", "h100-8b", "--generate", "random", "--sweep", "replicas=0"], "a whole number from 1"),
        (["--step-times", "h100-8b", "--generate", "random", "--max-num-seqs", "0"], "--max-num-seqs"),
        (["--step-times", "h100-8b", "--generate", "random", "--queue-timeout-s", "5"], "leave --queue-timeout-s out"),
        (["--step-times", "h100-8b", "--generate", "random", "--sweep", "token-timeout-s=5"], "leave --token-timeout-s out"),
        (["--learn", "http://127.0.0.1:9", "--step-times", "times"], "--learn http://127.0.0.1:9: "),
        (["--learn", "file:///etc/passwd", "--step-times", "times"], "must be a URL such as http://"),
        (["--learn", "http://127.0.0.1:9"], "--learn needs --step-times FILE to save to"),
        (["--learn", "http://127.0.0.1:9", "--step-times", "times", "--json", "x"], "--json needs requests"),
        (["--learn", "http://127.0.0.1:9", "--step-times", "h100-8b"], "is a profile of Triptych"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "{" in arguments[1:2] or (arguments[1:2] and arguments[1].startswith("{")):
        path = tmp_path / "times.json"
        path.write_text(arguments[1])
        arguments = ["--step-times", str(path)]
    assert cli.main(["simulate", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("triptych simulate: ")
    assert reason in error
    assert error.count("\n") == 1


def test_an_answer_that_cannot_be_written_is_one_line(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "absent" / "figures.json"
    assert cli.main(["simulate", *files, "--json", str(path)]) == 1
    assert capsys.readouterr().err == f"triptych simulate: {path}: No such file or directory\n"


def test_a_request_that_never_fits_is_refused(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *files, "--blocks", "2"]) == 2
    assert "the request that arrives at 0 s: This deployment's maximum context" in capsys.readouterr().err


METRICS = b"""# TYPE triptych:step_seconds histogram
triptych:step_seconds_count{engine="w0",kind="prefill",bucket="128"} 4.0
triptych:step_seconds_sum{engine="w0",kind="prefill",bucket="128"} 0.4
triptych:step_seconds_count{engine="w0",kind="decode",bucket="8"} 10.0
triptych:step_seconds_sum{engine="w0",kind="decode",bucket="8"} 0.1
triptych:step_seconds_count{engine="w1",kind="decode",bucket="8"} 10.0
triptych:step_seconds_sum{engine="w1",kind="decode",bucket="8"} 0.3
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",cache_dtype="bf16",enable_prefix_caching="True",engine="w0",num_gpu_blocks="50"} 1.0
"""


class _Metrics(BaseHTTPRequestHandler):
    answers: ClassVar = {
        "/metrics": METRICS,
        "/unlabelled/metrics": METRICS.replace(b'kind="prefill",', b""),
        "/page/metrics": b"<html>\n",
        "/endless/metrics": b"#\n" * (9 << 20),
        "/zero/metrics": METRICS.replace(b" 0.4", b" 0"),
    }

    def do_GET(self) -> None:
        if self.path == "/broken/metrics":
            self.wfile.write(b"SSH-2.0\r\n")
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answers.get(self.path, b""))

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture
def gateway() -> Iterator[str]:
    """The URL of a server with metrics."""
    with HTTPServer(("127.0.0.1", 0), _Metrics) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("unlabelled", "its /metrics are not those of Triptych"),
        ("page", "its /metrics are not those of Triptych"),
        ("endless", "more than 16 MiB of metrics"),
        ("zero", "chunk_s.128: Input should be greater than 0"),
        ("broken", "no valid HTTP answer (BadStatusLine)"),
    ],
)
def test_metrics_that_cannot_be_read_are_one_line(
    gateway: str, path: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.main(["simulate", "--learn", gateway + path, "--step-times", str(tmp_path / "times.json")]) == 2
    )
    assert capsys.readouterr().err == f"triptych simulate: --learn {gateway}{path}: {reason}\n"


def test_step_times_are_learned_from_metrics(
    files: list[str], gateway: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "learned.json"
    assert cli.main(["simulate", "--learn", gateway, "--step-times", str(saved)]) == 0
    assert capsys.readouterr().out == f"step times are in {saved}\n"
    times = json.loads(saved.read_text())
    assert times["chunk_s"] == {"128": pytest.approx(0.1)}
    assert times["decode_s"] == {"8": pytest.approx(0.02)}
    assert (times["max_num_seqs"], times["max_num_batched_tokens"], times["kv_tokens"]) == (8, 128, 6400)
    figures = simulated(tmp_path, *files[:2], "--step-times", str(saved))
    assert figures["ttft_s"]["p50"] == pytest.approx(0.1)


def test_the_plot_has_a_curve_for_each_tenant_and_setting(files: list[str], tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    (tmp_path / "trace.jsonl").write_text(TRACE.replace('"a"', '"all"'))
    assert cli.main(["simulate", *files, "--svg", str(path), "--sweep", "replicas=1,2"]) == 0
    drawing = ET.fromstring(path.read_text())  # noqa: S314 - our own drawing
    texts = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"replicas 1, all", "replicas 1, tenant all", "replicas 2, tenant b", "ttft, seconds"} <= set(
        texts
    )
    assert len(list(drawing.iter("{http://www.w3.org/2000/svg}polyline"))) == 3 * 2 * 3
