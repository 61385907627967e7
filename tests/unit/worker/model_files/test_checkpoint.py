"""Complete files are accepted and hashed; damaged, missing and pickled files are refused."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from protos.errors import ConfigurationRefused
from tests.support.checkpoints import safetensors_cases
from tests.support.checkpoints.cases import Case
from tests.support.foreign import Foreign, foreign_folders
from worker_svc.model_files.checkpoint import Checkpoint, dummy_digest, start_digest

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
        save_file({name: torch.zeros(1)}, tmp_path / name)
    checkpoint = Checkpoint.open(tmp_path)
    assert [shard.path.name for shard in checkpoint.shards] == taken
    assert checkpoint.ignored == tuple(sorted(set(files) - set(taken)))


def test_the_single_file_comes_before_an_index(folder: Path) -> None:
    """An index may be left over from an earlier, sharded save, even without its files."""
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    (folder / SECOND).unlink()
    checkpoint = Checkpoint.open(folder)
    assert [shard.path.name for shard in checkpoint.shards] == ["model.safetensors"]
    assert checkpoint.ignored == (FIRST,)


def test_the_index_chooses_among_copies_of_a_tensor(folder: Path) -> None:
    save_file({"c": torch.zeros(10, dtype=torch.int8), "a": torch.zeros(2)}, folder / SECOND)
    assert [set(shard.tensors) for shard in Checkpoint.open(folder).shards] == [{"a", "b"}, {"c"}]


def test_files_that_the_index_does_not_name(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"")
    assert Checkpoint.open(folder).ignored == ("adapter_model.safetensors",)


@pytest.mark.parametrize("case", safetensors_cases.FILES, ids=lambda case: case.name)
def test_damaged_and_missing_files_are_refused(case: Case, tmp_path: Path) -> None:
    folder = case.write(tmp_path / "model")
    if case.name.endswith("an adapter alone"):  # a model without tensors of its own: compared later
        assert Checkpoint.open(folder).shards
        return
    line = refusal(folder)
    assert all(part in line for part in case.says), line


def test_experts_in_mxfp4_count_dequantized(tmp_path: Path) -> None:
    blocks, scales = (torch.zeros(shape, dtype=torch.uint8) for shape in ((2, 3, 16), (2, 3)))
    save_file({"down_proj_blocks": blocks, "down_proj_scales": scales}, tmp_path / "model.safetensors")
    assert Checkpoint.open(tmp_path).num_bytes(4) >= 2 * 3 * 32 * 4


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickled_weights_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04")
    assert refusal(tmp_path) == (
        f"{tmp_path} has only pickled weights ({name}), and unpickling runs code; convert them to safetensors"
    )


def digest(folder: Path, cache: Path) -> str:
    return start_digest(sorted(folder.glob("*.safetensors")), cache).result(timeout=60)


def save(folder: Path, **values: float) -> Path:
    """Makes a folder with a file for each keyword, which holds its value 1,001 times."""
    folder.mkdir(exist_ok=True)
    for name, value in values.items():
        tensor = torch.full((1_001,), value)
        save_file({"weight": tensor}, folder / f"{name}.safetensors")
    return folder


def test_equal_files_have_equal_digests(tmp_path: Path) -> None:
    """The folder's name does not matter; one changed element, a file's name or a further file does."""
    cache = tmp_path / "cache"
    first = digest(save(tmp_path / "a", one=1.0, two=2.0), cache)
    assert len(first) == 64
    assert digest(save(tmp_path / "b", one=1.0, two=2.0), cache) == first
    tuned = torch.full((1_001,), 2.0)
    tuned[500] = 2.0001
    save_file({"weight": tuned}, tmp_path / "b" / "two.safetensors")
    others = [
        digest(tmp_path / "b", cache),
        digest(save(tmp_path / "c", one=1.0, three=2.0), cache),
        digest(save(tmp_path / "d", one=1.0, two=2.0, three=3.0), cache),
        digest(save(tmp_path / "e", one=2.0, two=1.0), cache),
    ]
    assert len({first, *others}) == 5


def test_a_file_is_read_once(tmp_path: Path) -> None:
    """The cache has its digest until the file is written again, even with its old time and size."""
    cache, folder = tmp_path / "cache", save(tmp_path / "a", one=1.0)
    path = folder / "one.safetensors"
    first = digest(folder, cache)
    (entry,) = cache.iterdir()
    assert entry.read_text() == hashlib.sha256(path.read_bytes()).hexdigest()
    entry.write_text("ab" * 32)
    assert digest(folder, cache) != first  # the cache is used
    entry.write_text("cut off")
    assert digest(folder, cache) == first
    before = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digest(folder, cache) != first


def test_a_hub_file_is_not_read(tmp_path: Path) -> None:
    """The hub's cache links to blobs named by their hash; a folder with the same file is equal."""
    content = save(tmp_path / "a", one=1.0) / "one.safetensors"
    name = hashlib.sha256(content.read_bytes()).hexdigest()
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots"
    blobs.mkdir(parents=True)
    snapshot.mkdir()
    (blobs / name).write_bytes(b"not read")
    (snapshot / "one.safetensors").symlink_to(blobs / name)
    cache = tmp_path / "cache"
    assert digest(snapshot, cache) == digest(tmp_path / "a", cache)
    assert len(list(cache.iterdir())) == 1


def test_a_cache_that_cannot_be_written_costs_no_start(tmp_path: Path) -> None:
    """A file stands where the cache's folder should be."""
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    folder = save(tmp_path / "a", one=1.0)
    assert digest(folder, blocked) == digest(folder, tmp_path / "cache")


@foreign_folders
def test_a_cache_that_others_could_change_is_not_used(foreign: Foreign, tmp_path: Path) -> None:
    """Neither read nor written: the files are read, and the start goes on."""
    cache, folder = tmp_path / "cache", save(tmp_path / "a", one=1.0)
    first = digest(folder, cache)
    (entry,) = cache.iterdir()
    entry.write_text("ab" * 32)
    foreign(cache)
    assert digest(folder, cache) == first
    assert entry.read_text() == "ab" * 32


def test_weights_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationRefused, match=r"cannot read the weights: .*gone\.safetensors"):
        start_digest([tmp_path / "gone.safetensors"], tmp_path).result(timeout=60)


def test_made_up_weights_differ_by_seed_and_device() -> None:
    """Generators of different devices make different numbers."""
    assert len({dummy_digest(0, "cpu"), dummy_digest(1, "cpu"), dummy_digest(0, "cuda")}) == 3
