"""A checkpoint has the right numbers or is refused by name; see `tests.support.checkpoints.cases`."""

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoints import gguf_cases, safetensors_cases
from tests.support.checkpoints.cases import Case, check

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM and transformers
]

# Every refusal of a GGUF file is tried in `tests.unit.worker.model_files.test_gguf_convert`, in one process.
CASES = [
    *safetensors_cases.CASES,
    *(case for case in gguf_cases.CASES if case.kind == "right" or case.quick),
]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path | None]:
    """Returns the folder of a case's float32 weights, which cases share."""
    made: dict[Callable[[Path], Path], Path] = {}

    def folder(case: Case) -> Path | None:
        if case.expected is None:
            return None
        if case.expected not in made:
            made[case.expected] = case.expected(tmp_path_factory.mktemp("floats") / "model")
        return made[case.expected]

    return folder


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.quick else pytest.mark.slow) for case in CASES],
)
def test_a_checkpoint_is_right_or_refused(
    case: Case, tmp_path: Path, references: Callable[[Case], Path | None]
) -> None:
    """A served one's log-probabilities are those of its float32 weights; the others' line names the cause."""
    check(case, tmp_path / "model", references(case))


@pytest.mark.parametrize(
    "name",
    [
        "ct: sparsity_config format sparse-24-bitmask",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "plain: half of the file",
                "plain: num_hidden_layers 30",
                "gptq: without a layer",
                "awq: without a layer",
                "llama gguf: fewer tokens",
            )
        ),
    ],
)
def test_a_worker_ends_with_the_line(name: str, tmp_path: Path) -> None:
    """Its process exits with 2 and the whole line at the end, within 10 s of a processor's time."""
    (case,) = [case for case in CASES if case.name == name]
    model = case.write(tmp_path / "model")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [
            sys.executable, "-m", "worker_svc", "--port", "0", "--scheduler-address", "", "--device", "cpu",
            "--model", str(model),
        ],
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("triptych worker: ")
    assert all(part in line for part in case.says), line
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10
