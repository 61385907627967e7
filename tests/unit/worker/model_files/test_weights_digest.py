"""The digest of a model's weights: what changes it, and when files are read again."""

import hashlib
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from protos.errors import ConfigurationRefused
from worker_svc.model_files.weights_digest import dummy_digest, start_digest


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


def test_weights_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    """The reason is one line."""
    with pytest.raises(ConfigurationRefused, match=r"cannot read the weights: .*gone\.safetensors"):
        start_digest([tmp_path / "gone.safetensors"], tmp_path).result(timeout=60)


def test_made_up_weights_differ_by_seed_and_device() -> None:
    """Generators of different devices make different numbers."""
    assert len({dummy_digest(0, "cpu"), dummy_digest(1, "cpu"), dummy_digest(0, "cuda")}) == 3
