"""A checkpoint has the right numbers or is refused by name; see `tests.support.checkpoints.cases`."""

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

CASES = [*safetensors_cases.CASES, *gguf_cases.CASES]


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
