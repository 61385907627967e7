"""A new scalar sampling parameter costs the few files that CONTRIBUTING.md lists."""

import re

import pytest

from tests.support.paths import PACKAGES, ROOT, sources

SAMPLING_PARAMETER_FILES = {
    "protos/triptych/v1/common.proto",
    "gateway/schemas/sampling.py",
    "gateway/generation/request_builder.py",
    "worker_svc/sampling/state.py",
    "worker_svc/sampling/adjust.py",
}
"""CONTRIBUTING.md lists these and one table of tests."""


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_a_scalar_sampling_parameter_is_named_in_the_documented_files_only(name: str) -> None:
    """The scheduler, the wire's validation and the translation of plans do not know the parameter."""
    word = re.compile(rf"\b{name}\b")
    schemas = ROOT.glob("protos/triptych/v1/*.proto")
    named = {
        str(path.relative_to(ROOT))
        for path in (*sources(*PACKAGES), *schemas)
        if word.search(path.read_text())
    }
    assert named <= SAMPLING_PARAMETER_FILES
    # The kernel's file need not name it, and the state only what decides which kernels run.
    assert named >= SAMPLING_PARAMETER_FILES - {
        "worker_svc/sampling/adjust.py",
        "worker_svc/sampling/state.py",
    }
    assert all((ROOT / path).is_file() for path in SAMPLING_PARAMETER_FILES)
