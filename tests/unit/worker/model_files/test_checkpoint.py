"""Checkpoints are checked by their headers: files must be complete, none may be missing or pickled."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from protos.errors import ConfigurationRefused
from worker_svc.model_files.checkpoint import Checkpoint

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two files and their index."""
    save_file({"a": torch.zeros(4, 8), "b": torch.zeros(3, dtype=torch.bfloat16)}, tmp_path / FIRST)
    save_file({"c": torch.zeros(10, dtype=torch.int8)}, tmp_path / SECOND)
    weight_map = {"a": FIRST, "b": FIRST, "c": SECOND}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def refusal(folder: Path) -> str:
    """The one line that refuses a folder."""
    with pytest.raises(ConfigurationRefused) as caught:
        Checkpoint.open(folder)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_files_and_sizes(folder: Path) -> None:
    """Sizes are as stored, or converted to another floating-point type; integers keep their size."""
    checkpoint = Checkpoint.open(folder)
    assert [shard.path.name for shard in checkpoint.shards] == [FIRST, SECOND]
    assert [set(shard.tensors) for shard in checkpoint.shards] == [{"a", "b"}, {"c"}]
    assert checkpoint.num_bytes() == 4 * 8 * 4 + 3 * 2 + 10
    assert checkpoint.num_bytes(2) == 4 * 8 * 2 + 3 * 2 + 10


@pytest.mark.parametrize(
    ("files", "taken"),
    [
        ([FIRST, SECOND, "consolidated.safetensors", "training_args.safetensors"], [FIRST, SECOND]),
        (["model.safetensors", "adapter_model.safetensors", FIRST], ["model.safetensors"]),
        (["consolidated.safetensors", "adapter_model.safetensors"], ["consolidated.safetensors"]),
        (["weights.safetensors", "adapter_model.safetensors"], ["weights.safetensors"]),
    ],
)
def test_files_without_an_index(tmp_path: Path, files: list[str], taken: list[str]) -> None:
    """The single file goes before shards, and these before other names; the rest is ignored."""
    for name in files:
        save_file({"a": torch.zeros(1)}, tmp_path / name)
    checkpoint = Checkpoint.open(tmp_path)
    assert [shard.path.name for shard in checkpoint.shards] == taken
    assert checkpoint.ignored == tuple(sorted(set(files) - set(taken)))


def test_files_that_the_index_does_not_name(folder: Path) -> None:
    """They are ignored, even if they are no weights."""
    (folder / "adapter_model.safetensors").write_bytes(b"")
    assert Checkpoint.open(folder).ignored == ("adapter_model.safetensors",)


def test_an_adapter_alone_is_no_model(tmp_path: Path) -> None:
    """A folder with an adapter only has no weights."""
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    assert "has no weights" in refusal(tmp_path)


def test_a_missing_shard_is_named(folder: Path) -> None:
    """The refusal names the first missing file and how many there are."""
    (folder / SECOND).unlink()
    assert refusal(folder).startswith(f"{folder} lacks 1 of 2 files that {INDEX} names, first {SECOND}")


def test_a_truncated_file_is_recognized(folder: Path) -> None:
    """A file that lacks or exceeds its header's length by a byte is damaged."""
    whole = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(whole[:-5])
    assert (
        refusal(folder)
        == f"{folder / FIRST} is damaged: 5 of 134 bytes of weights are missing; fetch it again"
    )
    for length in (0, 7, 8, 20):
        (folder / FIRST).write_bytes(whole[:length])
        assert refusal(folder).startswith(f"{folder / FIRST} is damaged: its header is cut off")
    (folder / FIRST).write_bytes(whole + b"x")
    assert "1 bytes follow its last tensor" in refusal(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"not json at all",
        b"[1, 2]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "F32", "shape": "x", "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}',
    ],
)
def test_a_broken_header_is_refused(folder: Path, header: bytes) -> None:
    """Any header that does not describe the file is refused as damaged."""
    (folder / FIRST).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert refusal(folder).startswith(f"{folder / FIRST} is damaged: ")


def test_an_index_is_not_trusted(folder: Path) -> None:
    """A broken or empty index is refused, and so are entries for missing tensors or files elsewhere."""
    index = folder / INDEX
    index.write_text("{")
    assert refusal(folder) == f"{index} cannot be read; fetch it again"
    index.write_text('{"weight_map": {}}')
    assert "names no files" in refusal(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    assert "outside its folder" in refusal(folder)
    index.write_text(json.dumps({"weight_map": {"a": FIRST, "z": SECOND}}))
    assert "has no tensor z" in refusal(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickled_weights_are_refused(tmp_path: Path, name: str) -> None:
    """Pickles are never opened; the refusal asks for safetensors."""
    (tmp_path / name).write_bytes(b"\x80\x04")
    assert refusal(tmp_path) == (
        f"{tmp_path} has only pickled weights ({name}), and unpickling runs code; convert them to safetensors"
    )


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    """The refusal names --load-format dummy."""
    assert (
        refusal(tmp_path)
        == f"{tmp_path} has no weights (*.safetensors); add them, or use --load-format dummy for made-up weights"
    )
