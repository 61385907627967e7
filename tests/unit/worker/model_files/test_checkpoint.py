"""Weights are looked at before they are read: whole, all there, and never pickled."""

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
    """Two files and their index."""
    save_file({"a": torch.zeros(4, 8), "b": torch.zeros(3, dtype=torch.bfloat16)}, tmp_path / FIRST)
    save_file({"c": torch.zeros(10, dtype=torch.int8)}, tmp_path / SECOND)
    weight_map = {"a": FIRST, "b": FIRST, "c": SECOND}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def reason(folder: Path) -> str:
    """Why the folder is refused; one line."""
    with pytest.raises(ConfigurationRefused) as caught:
        Checkpoint.open(folder)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_files_and_sizes(folder: Path) -> None:
    """Stored sizes, and those with another floating-point type; integers stay what they are."""
    checkpoint = Checkpoint.open(folder)
    assert [shard.path.name for shard in checkpoint.shards] == [FIRST, SECOND]
    assert [set(shard.tensors) for shard in checkpoint.shards] == [{"a", "b"}, {"c"}]
    assert checkpoint.num_bytes() == 4 * 8 * 4 + 3 * 2 + 10
    assert checkpoint.num_bytes(2) == 4 * 8 * 2 + 3 * 2 + 10


def test_files_without_an_index(folder: Path) -> None:
    """All of the folder's files then, but for the same weights under other names."""
    (folder / INDEX).unlink()
    save_file({"a": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert len(Checkpoint.open(folder).shards) == 2
    (folder / FIRST).unlink()
    (folder / SECOND).unlink()
    assert len(Checkpoint.open(folder).shards) == 1


def test_a_missing_shard_is_named(folder: Path) -> None:
    """With how many there should be."""
    (folder / SECOND).unlink()
    assert reason(folder).startswith(f"1 of 2 files that {INDEX} names are not in {folder}, first {SECOND}")


def test_a_truncated_file_is_told_from_its_header(folder: Path) -> None:
    """To the byte, wherever it is cut off."""
    whole = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(whole[:-5])
    assert (
        reason(folder)
        == f"{folder / FIRST} is damaged: 5 of 134 bytes of weights are missing; fetch it again"
    )
    for length in (0, 7, 8, 20):
        (folder / FIRST).write_bytes(whole[:length])
        assert reason(folder).startswith(f"{folder / FIRST} is damaged: its header is cut off")
    (folder / FIRST).write_bytes(whole + b"x")
    assert "1 bytes follow its last tensor" in reason(folder)


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
    """Whatever stands in it."""
    (folder / FIRST).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert reason(folder).startswith(f"{folder / FIRST} is damaged: ")


def test_an_index_is_not_trusted(folder: Path) -> None:
    """It may be broken, empty, name tensors that are not there, or files of somebody else's."""
    index = folder / INDEX
    index.write_text("{")
    assert reason(folder) == f"{index} cannot be read; fetch it again"
    index.write_text('{"weight_map": {}}')
    assert "names no files" in reason(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    assert "outside of its folder" in reason(folder)
    index.write_text(json.dumps({"weight_map": {"a": FIRST, "z": SECOND}}))
    assert "has no tensor z" in reason(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickled_weights_are_refused(tmp_path: Path, name: str) -> None:
    """Never opened; the line says what is wanted."""
    (tmp_path / name).write_bytes(b"\x80\x04")
    assert reason(tmp_path) == (
        f"{tmp_path} has its weights in {name} alone, and unpickling runs code; convert them to safetensors"
    )


def test_no_weights_at_all(tmp_path: Path) -> None:
    """The line names the way to do without."""
    assert (
        reason(tmp_path)
        == f"{tmp_path} has no weights (*.safetensors); use --load-format dummy to make some up"
    )
