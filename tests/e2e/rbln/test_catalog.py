"""NPU graphs are compiled without an NPU and found by a worker that has one, with the vendor's packages."""

from pathlib import Path

import pytest

from protos.service.settings import load
from scheduler_svc.settings import Settings
from tests.support import tiny_models
from tests.support.rbln.vendor_packages import compile_blindly, running_worker
from tests.support.scheduler.running_scheduler import collect, generate_request, run_scheduler
from worker_svc.graphs.compile_cache import CompileCache

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.npu,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing transformers
]

SIZES = ("--max-num-seqs", "2", "--max-model-len", "256", "--block-size", "1024")
KV = {"TRIPTYCH_KV_MEMORY": "0.05"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with windows."""
    return tiny_models.write("gemma3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def catalog(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of code that was compiled without an NPU: two prefill graphs and two decode graphs."""
    folder = tmp_path_factory.mktemp("code") / "rbln"
    assert compile_blindly(model, folder, *SIZES, **KV)[0] == 4
    return folder


def test_the_code_is_one_entry(catalog: Path) -> None:
    (key,) = CompileCache(catalog).entries()
    manifest = CompileCache(catalog).verify(key)
    assert manifest is not None
    assert sum(name.endswith(".rbln") for name in manifest.files) == 6


def test_a_second_run_compiles_nothing(model: Path, catalog: Path) -> None:
    """The command counts what the compiler added to the entry, and says so."""
    count, output = compile_blindly(model, catalog, *SIZES, **KV)
    assert count == 0
    assert "compiled_nothing" in output


def test_code_that_the_compiler_does_not_take_is_counted(model: Path, catalog: Path) -> None:
    """The entry's key fits, but the compiler compiles again: a warning has the number."""
    count, output = compile_blindly(model, catalog, *SIZES, **KV, FAKE_REBEL_VERSION="0.12.1")
    assert count > 0
    assert f"compiled={count}" in output.split("compiled_despite_entry")[1]


async def test_a_worker_with_an_npu_takes_the_code(model: Path, catalog: Path, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        async with run_scheduler(load(Settings, [*SIZES])) as scheduler:
            flags = ("--require-precompiled", "--compile-cache-dir", str(catalog))
            with running_worker(model, scheduler.port, *flags, variables=KV, log=log):
                assert await scheduler.serving.get()
                request = generate_request([5, 6, 7], max_tokens=4, temperature=0.0, ignore_eos=True)
                events = await collect(scheduler.inference.Generate(request))
    assert sum(len(event.token_ids) for event in events) == 4
    printed = (tmp_path / "log").read_text()
    assert "compiled_nothing" in printed
    assert "compiled_despite_entry" not in printed
