"""A worker imports little of vLLM; what is deferred behaves like the real thing when it is used."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.paths import ROOT
from worker_svc.vllm_adapter import startup
from worker_svc.vllm_adapter.startup import ENGINE_ONLY, deferred

_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1, "max_position_embeddings": 128,
    "vocab_size": 64, "eos_token_id": 2,
}  # fmt: skip
_LOAD = """
    import sys
    from pathlib import Path
    from worker_svc.devices import open_device
    from worker_svc.vllm_adapter import startup
    device = open_device("cpu")
    startup.prepare("cpu")
    from worker_svc.vllm_adapter.model import VllmModel
    model = VllmModel(Path({folder!r}), device, dtype="float32", seed=0, dummy_weights=True)
    model.load_weights()
    absent = "openai", "fastapi", "vllm.entrypoints", "torch._inductor.compile_fx", "torch._inductor.lowering"
    print([name for name in absent if name in sys.modules])
"""
_USE = """
    import vllm.v1.request as request
    from vllm.config.reasoning import ReasoningParserManager as deferred
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    made = request.StructuredOutputRequest.from_sampling_params(params)
    from vllm.reasoning import ReasoningParserManager as real
    from vllm.v1.structured_output.request import StructuredOutputRequest
    print(
        type(made) is StructuredOutputRequest, isinstance(made, request.StructuredOutputRequest),
        deferred.reasoning_parsers is real.reasoning_parsers, deferred is not real,
    )
    import torch._inductor.compile_fx as compiler
    from torch._inductor.lowering import FALLBACK_ALLOW_LIST
    print(sys.modules["torch._inductor.compile_fx"] is compiler, "vllm::any" in FALLBACK_ALLOW_LIST)
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a process prints that loads a small model, and then uses what was deferred."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    script = textwrap.dedent(_LOAD).format(folder=str(folder)) + textwrap.dedent(_USE)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-3:]


def test_a_worker_imports_neither_server_nor_compiler(printed: list[str]) -> None:
    """A process with a loaded model has none of the packages that vLLM's server and Inductor need."""
    assert printed[0] == "[]"


def test_deferred_names_are_the_real_ones_once_used(printed: list[str]) -> None:
    """VLLM's engine works in a worker's process, and the compiler has vLLM's patches."""
    assert printed[1:] == ["True True True True", "True True"]


def test_a_function_compiles_when_it_is_first_called(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, dict[str, Any]]] = []

    def compile_now(function: Callable[[int], int], **options: Any) -> Callable[[int], int]:
        compiled.append((function.__name__, options))
        return lambda number: -function(number)

    monkeypatch.setattr(torch, "compile", compile_now)
    with deferred():

        @torch.compile(dynamic=True)
        def double(number: int) -> int:
            return 2 * number

        @torch.compile
        def triple(number: int) -> int:
            return 3 * number

    assert vars(torch)["compile"] is compile_now
    assert compiled == []
    assert [double(1), double(2), triple(1)] == [-2, -4, -3]
    assert compiled == [("double", {"dynamic": True}), ("triple", {})]


def test_the_block_leaves_no_stand_in() -> None:
    """After the block an import gives the real package, also where the block imported a part of it."""
    before = {name for name in ENGINE_ONLY if name in sys.modules}
    finders = list(sys.meta_path)
    with deferred():
        from vllm.v1.structured_output import backend_types  # noqa: F401 - only imported
    assert {name for name in ENGINE_ONLY if name in sys.modules} == before
    assert [finder for finder in sys.meta_path if type(finder).__name__ == "_StandIns"] == []
    assert set(finders) - set(sys.meta_path) == set()


def test_all_variables_that_the_patches_set_are_set_at_once() -> None:
    """Other modules read them. Those that only ask for a patch keep the patches from being deferred."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    patches = Path(spec.origin).with_name("env_override.py").read_text()
    ours = Path(startup.__file__).read_text()
    assigned = r'^os\.environ(?:\.setdefault\()?\W"?(\w+)"'
    names = re.findall(assigned, patches, re.MULTILINE)
    assert len(names) == 4
    assert [name for name in names if f'"{name}"' not in ours] == []
    switches = re.findall(r'os\.environ\.get\(\s*"(VLLM_\w+)", "0"', patches)
    assert set(switches) == set(startup._OTHER_PATCHES)


@pytest.mark.parametrize("name", startup._OTHER_PATCHES)
def test_patches_of_something_else_are_not_deferred(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    for module in (startup._PATCHES, startup.COMPILER):
        monkeypatch.delitem(sys.modules, module, raising=False)
    before = dict(os.environ)
    with deferred():
        assert startup._PATCHES not in sys.modules
    assert dict(os.environ) == before
