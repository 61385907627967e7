"""Who imports vLLM."""

from tests.support.paths import ROOT


def test_only_two_places_import_vllm() -> None:
    """The worker's adapter, and the command that runs vLLM's bench."""
    importing = {
        "worker_svc/vllm_adapter" if "vllm_adapter" in path.parts else str(path.relative_to(ROOT))
        for package in ("gateway", "scheduler_svc", "worker_svc", "deploy", "protos")
        for path in (ROOT / package).rglob("*.py")
        if any(
            line.strip().startswith(("import vllm", "from vllm")) or 'import_module("vllm' in line
            for line in path.read_text().splitlines()
        )
    }
    assert importing == {"deploy/commands/bench.py", "worker_svc/vllm_adapter"}
