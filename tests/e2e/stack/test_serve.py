"""`triptych serve` with a command line and a file of `vllm serve`, and a real model."""

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(240)]

_FILE = """
served-model-name: [small, org/smol]
max-model-len: 1K
enable-chunked-prefill: true
override-generation-config: {max_new_tokens: 5}
worker: {device: cpu}
"""


def test_a_unit_file_of_vllm_serve(tmp_path: Path) -> None:
    """The flags do what they do in vLLM: names, keys, a Unix socket, templates and lengths of answers."""
    file, uds = tmp_path / "vllm.yaml", tmp_path / "http.sock"
    file.write_text(_FILE)
    command = [
        sys.executable, "-m", "deploy.cli", "serve", "smollm2", "--config", str(file), "--uds", str(uds),
        "--max-num-seqs", "2", "--gpu-memory-utilization", "0.1", "--api-key", "k1", "k2", "-O1",
        "--disable-log-stats", "--run-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            printed = []
            for line in process.stdout:
                printed.append(line)
                if "curl --unix-socket" in line:
                    break
            assert f"Serving small on {uds}" in "".join(printed)
            assert any(line.startswith("--disable-log-stats has no effect") for line in printed)
            transport = httpx.HTTPTransport(uds=str(uds))
            with httpx.Client(transport=transport, base_url="http://serve", timeout=60) as http:
                body = {
                    "model": "org/smol",
                    "messages": [{"role": "user", "content": "Count to one hundred."}],
                    "temperature": 0,
                }
                assert http.post("/v1/chat/completions", json=body).status_code == 401
                http.headers["authorization"] = "Bearer k2"
                answer = http.post("/v1/chat/completions", json=body).json()
                assert (answer["model"], answer["usage"]["completion_tokens"]) == ("small", 5)
                listed = http.get("/v1/models").json()["data"]
                assert [(card["id"], card["max_model_len"]) for card in listed] == [
                    ("small", 1024), ("org/smol", 1024),
                ]  # fmt: skip
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert not uds.exists()
