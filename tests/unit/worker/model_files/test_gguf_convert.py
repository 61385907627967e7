"""A GGUF file is converted as llama.cpp reads it, or refused by name.

Every row of the table of checkpoints is tried here without a worker; `tests.e2e.worker.test_checkpoint_cases`
serves those that can be.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig

from protos.errors import ConfigurationRefused
from tests.support.checkpoints import gguf_cases
from tests.support.checkpoints.cases import Case
from tests.support.checkpoints.gguf_cases import V, ggml, put, vocabulary, without, write
from tests.support.paths import ROOT
from worker_svc.model_files import loader
from worker_svc.quantized import codes
from worker_svc.quantized.checkpoint_config import read

pytestmark = pytest.mark.usefixtures("cache", "in_process")

ROOM_KIB = 1 << 20
"""Of addresses, for a converter; its packages need a part."""
TOKENS = {token: i for i, token in enumerate(vocabulary())}


def convert(folder: Path, *changes: gguf_cases.Change, family: str = "llama") -> Path:
    """Returns the folder of a changed model."""
    return loader.resolve(str(write(family, changes, folder)))


def load(folder: Path, name: str) -> Any:
    """Returns the content of a JSON file."""
    return json.loads((folder / name).read_text())


@pytest.mark.parametrize("kind", ["damaged", "contradicting", "unsupported"])
def test_unusable_files_are_refused_by_name(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("ERROR")
    wrong = []
    for number, case in enumerate(case for case in gguf_cases.CASES if case.kind == kind):
        try:
            line = f"served from {loader.resolve(str(case.write(tmp_path / str(number))))}"
        except ConfigurationRefused as refused:
            line = refused.message
        if "\n" in line or not all(part in line for part in case.says):
            wrong.append(f"{case.name}: {line}")
    assert wrong == []


HUGE = [case for case in gguf_cases.CASES if "2^" in case.name]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=pytest.mark.slow if number else ())
        for number, case in enumerate(HUGE)
    ],
)
def test_counts_beyond_the_memory_take_none(tmp_path: Path, case: Case) -> None:
    """The converter refuses a promise of 2^60 entries within little room for addresses."""
    command = [sys.executable, "-m", "worker_svc.model_files.gguf_convert", str(case.write(tmp_path)), "-"]
    limited = ["sh", "-c", 'ulimit -v "$0" && exec "$@"', str(ROOM_KIB), *command]
    done = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert all(part in done.stderr for part in case.says), done.stderr


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_right_files_have_the_weights_of_their_numbers(tmp_path: Path, family: str) -> None:
    """Weights equal those dequantized apart, bit for bit; sizes and rotary embeddings are the model's."""
    wrong = []
    for number, case in enumerate(gguf_cases.CASES):
        if case.expected is None or not case.name.startswith(family):
            continue
        folder = loader.resolve(str(case.write(tmp_path / f"{number}")))
        reference = case.expected(tmp_path / f"{number}-floats")
        found, expected = floats(folder), load_file(reference / "model.safetensors")
        if found.keys() != expected.keys() or not all(found[n].equal(expected[n]) for n in found):
            wrong.append(case.name)
        own, other = (AutoConfig.from_pretrained(each).to_dict() for each in (folder, reference))
        ignored = {"architectures", "dtype", "quantization_config", "sliding_window", "_name_or_path"}
        differing = [n for n in own.keys() - ignored if not n.endswith("_id") and own[n] != other.get(n)]
        wrong += [f"{case.name}: {name} {own[name]} {other.get(name)}" for name in differing]
    assert wrong == []


def floats(folder: Path) -> dict[str, torch.Tensor]:
    """Returns a model's weights in float32."""
    found = load_file(folder / "model.safetensors")
    quantization = read(folder)
    for name in [name for name in found if name.endswith(".weight_packed")]:
        module = name.removesuffix(".weight_packed")
        scheme = quantization and quantization.scheme_of(module)
        assert scheme
        packed, scales = found.pop(name), found.pop(f"{module}.weight_scale")
        del found[f"{module}.weight_shape"]
        found[f"{module}.weight"] = codes.dequantize(codes.unpack(packed, scheme.bits), scales, scheme.bits)
    return {name: tensor.float() for name, tensor in found.items()}


def test_user_defined_tokens_are_whole(tmp_path: Path) -> None:
    """A token of the type USER_DEFINED is found in a text, and shown in one, as llama.cpp does."""
    tokenizer = Tokenizer.from_file(str(convert(tmp_path / "m") / "tokenizer.json"))
    ids = [TOKENS["ab"], TOKENS["<think>"], TOKENS["c"], TOKENS["<|im_end|>"]]
    assert tokenizer.encode("ab<think>c<|im_end|>").ids == ids
    assert tokenizer.decode(ids) == "ab<think>c"  # a control token is hidden


@pytest.mark.parametrize(
    ("family", "begins", "ends", "expected"),
    [
        ("llama", None, None, []),  # llama.cpp's default of each kind
        ("llama", True, None, ["bos"]),
        ("llama", True, True, ["bos", "eos"]),
        ("llama", False, True, ["eos"]),
        ("gemma3", None, None, ["bos"]),
        ("gemma3", False, None, []),
        ("gemma3", True, True, ["bos", "eos"]),
    ],
)
def test_texts_begin_and_end_as_the_file_says(
    tmp_path: Path, family: str, begins: bool | None, ends: bool | None, expected: list[str]
) -> None:
    """`add_bos_token` and `add_eos_token` hold for both kinds of tokenizers."""
    asked = {"add_bos_token": begins, "add_eos_token": ends}
    changes = [put(ggml(name), value, V.BOOL) for name, value in asked.items() if value is not None]
    tokenizer = Tokenizer.from_file(str(convert(tmp_path / "m", *changes, family=family) / "tokenizer.json"))
    text = [TOKENS["ab"]]
    assert tokenizer.encode("ab").ids == [1] * ("bos" in expected) + text + [2] * ("eos" in expected)
    assert tokenizer.encode("ab", add_special_tokens=False).ids == text


@pytest.mark.parametrize(
    ("changes", "stops"),
    [
        ([], 2),
        ([put(ggml("eos_token_id"), 0), put(ggml("eot_token_id"), 2, V.UINT32)], [0, 2]),
        ([put(ggml("eot_token_id"), 4, V.UINT32), put(ggml("eom_token_id"), 3, V.UINT32)], [2, 4, 3]),
        ([put(ggml("eot_token_id"), 2, V.UINT32)], 2),
        ([put("tokenizer.chat_template", "{{ m }}<|im_end|>", V.STRING)], [2, 4]),
        ([without(ggml("eos_token_id"))], None),
        ([without(ggml("eos_token_id")), put(ggml("eot_token_id"), 4, V.UINT32)], 4),
    ],
)
def test_answers_end_at_every_end_of_the_file(
    tmp_path: Path, changes: list[gguf_cases.Change], stops: object
) -> None:
    """Ends of the text, of a turn and of a message end an answer; a turn's also by the chat template."""
    folder = convert(tmp_path / "m", *changes)
    assert load(folder, "generation_config.json").get("eos_token_id") == stops
    assert load(folder, "config.json").get("eos_token_id") == stops


def test_sentencepiece_has_its_usual_special_tokens(tmp_path: Path) -> None:
    """A file that names no special tokens has llama.cpp's: unknown 0, beginning 1, end 2."""
    names = [ggml(f"{name}_token_id") for name in ("bos", "eos", "unknown")]
    folder = convert(tmp_path / "m", without(*names), family="gemma3")
    found = load(folder, "config.json")
    assert [found[f"{name}_token_id"] for name in ("unk", "bos", "eos")] == [0, 1, 2]


def test_parts_are_one_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All parts and their folder lead to one conversion, which is made again after any part changes."""
    first = write("llama", [gguf_cases.sets(split=12, model=gguf_cases.part(1, 2))], tmp_path / "m")
    second = first.with_name(gguf_cases.part(2, 2))
    folder = loader.resolve(str(first))
    assert loader.display_name(str(first)) == "tiny"
    capfd.readouterr()
    assert loader.resolve(str(second)) == loader.resolve(str(first.parent)) == folder
    assert capfd.readouterr().err == ""
    second.write_bytes(second.read_bytes() + b"\0")
    loader.resolve(str(first))
    assert "is ready" in capfd.readouterr().err


def test_a_link_leads_to_all_parts(tmp_path: Path) -> None:
    first = write("llama", [gguf_cases.sets(split=12, model=gguf_cases.part(1, 2))], tmp_path / "m")
    link = tmp_path / "model.gguf"
    link.symlink_to(first)
    assert loader.resolve(str(link)) == loader.resolve(str(first))


def test_links_of_a_hub_cache_lead_to_all_parts(tmp_path: Path) -> None:
    made = write("llama", [gguf_cases.sets(split=12, model=None)], tmp_path / "m")
    links = tmp_path / "snapshot"
    links.mkdir()
    for number, path in enumerate(sorted(made.iterdir())):
        (links / path.name).symlink_to(path.rename(tmp_path / f"blob{number}"))
    assert (loader.resolve(str(links)) / "model.safetensors").is_file()
