"""Adapters are found in folders and on the hub, kept within limits and placed in slots of the device."""

import errno
import http.server
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from protos.errors import Internal, InvalidArgument, NotFound, Overloaded, Unavailable
from tests.unit.worker.lora.test_checkpoint import PATH, _tensors, _write
from worker_svc.devices.lora_stack import LayerWeights
from worker_svc.lora.checkpoint import CONFIG, WEIGHTS, AdapterCheckpoint, LoraLimits
from worker_svc.lora.store import AdapterStore, HostAdapter, find_files


class RecordingModel:
    """Fits every adapter, and notes what is placed."""

    def __init__(self) -> None:
        self.placed: dict[int, Any] = {}

    def fit(self, checkpoint: AdapterCheckpoint) -> Mapping[str, LayerWeights]:
        return {path: [pair] for path, pair in checkpoint.matrices.items()}

    def place(self, slot: int, matrices: Mapping[str, LayerWeights]) -> None:
        self.placed[slot] = matrices

    def select(self, slots: torch.Tensor) -> torch.Tensor:
        return slots


@pytest.fixture
def store() -> AdapterStore:
    return AdapterStore(LoraLimits(max_loras=2, max_rank=8, max_cpu_loras=3), RecordingModel())


def load(store: AdapterStore, adapter_id: int, source: str, revision: str = "") -> HostAdapter:
    """Loads an adapter into a place of its own."""
    store.reserve(adapter_id)
    return store.load(adapter_id, "a", source, revision)


def test_what_is_said_of_an_adapter(store: AdapterStore, tmp_path: Path) -> None:
    first = load(store, 1, str(_write(tmp_path)))
    assert first.rank == 4
    assert first.num_bytes == 4 * (4 * 6 + 10 * 4)
    assert load(store, 2, str(tmp_path)).digest == first.digest
    (tmp_path / "other").mkdir()
    other = _write(tmp_path / "other", _tensors(rank=4), lora_alpha=1)
    assert load(store, 3, str(other)).digest != first.digest


def test_a_full_host_forgets_the_adapter_that_was_used_least_recently(
    store: AdapterStore, tmp_path: Path
) -> None:
    source = str(_write(tmp_path))
    for adapter_id in (1, 2, 3):
        assert store.displaced([]) == []
        load(store, adapter_id, source)
    assert store.displaced([]) == [1]
    store.place(1)
    store.use(0, 1)
    assert store.displaced([]) == [2]
    assert store.displaced([2, 3]) == [1], "on the device it stays"
    store.reserve(4)
    assert store.displaced([]) == [2, 3], "an adapter that is being read has a place"
    with pytest.raises(Overloaded, match="requests use all 3 adapters that the worker holds"):
        store.displaced([1, 2])
    store.unload(4)
    store.unload(2)
    store.unload(2)
    assert store.displaced([1, 3]) == []
    store.forget()
    assert store.displaced([]) == []


@pytest.mark.parametrize("how", ["unload", "forget"])
def test_an_adapter_that_is_unloaded_while_it_is_read(tmp_path: Path, how: str) -> None:
    """It takes no place on the host, whenever its reading ends."""

    class Interrupted(RecordingModel):
        def fit(self, checkpoint: AdapterCheckpoint) -> Mapping[str, LayerWeights]:
            if how == "unload":
                kept.unload(1)
            else:
                kept.forget()
            return super().fit(checkpoint)

    kept: AdapterStore = AdapterStore(LoraLimits(max_loras=1, max_rank=8, max_cpu_loras=1), Interrupted())
    source = str(_write(tmp_path))
    with pytest.raises(Unavailable, match="adapter a was unloaded while it was read"):
        load(kept, 1, source)
    assert kept.displaced([]) == []


@pytest.mark.parametrize("source", ["~nosuchuser/x", "/" + 3000 * "x/"])
def test_odd_sources(store: AdapterStore, source: str) -> None:
    with pytest.raises((InvalidArgument, NotFound), match="adapter a"):
        load(store, 1, source)


def test_slots_of_the_device(store: AdapterStore, tmp_path: Path) -> None:
    """An adapter keeps its slot while a request uses it, and then until another one needs the place."""
    source = str(_write(tmp_path))
    for adapter_id in (1, 2, 3):
        load(store, adapter_id, source)
    model: Any = store._model
    assert (store.place(1), store.place(2), store.place(1)) == (0, 1, 0)
    assert set(model.placed[0]) == {PATH}
    assert store.num_placements == 2
    store.use(0, 1)
    store.use(5, 2)
    with pytest.raises(Internal, match="more than 2 adapters"):
        store.place(3)
    store.release(5)
    store.release(5)
    store.unload(1)
    assert (store.place(3), store.place(1)) == (1, 0), "what is on the device stays"
    with pytest.raises(Unavailable, match="load it again") as caught:
        store.place(4)
    assert caught.value.param == "adapter_id"
    store.forget_slots()
    with pytest.raises(Unavailable, match="load it again"):
        store.place(1)
    assert store.place(3) == 0


def test_a_copy_that_fails_leaves_its_slot_empty(tmp_path: Path) -> None:
    class Broken(RecordingModel):
        def place(self, slot: int, matrices: Mapping[str, LayerWeights]) -> None:
            raise RuntimeError("the device failed")

    kept = AdapterStore(LoraLimits(max_loras=1, max_rank=8, max_cpu_loras=1), RecordingModel())
    load(kept, 1, str(_write(tmp_path)))
    kept.place(1)
    load(kept, 2, str(tmp_path))
    kept._model = Broken()
    with pytest.raises(RuntimeError, match="the device failed"):
        kept.place(2)
    kept._model = RecordingModel()
    kept.unload(1)
    with pytest.raises(Unavailable):
        kept.place(1)
    assert kept.place(2) == 0


@pytest.mark.parametrize("source", ["/nowhere/adapter", "./nowhere", "nowhere", "a/b/c"])
def test_missing_folders(store: AdapterStore, source: str) -> None:
    with pytest.raises(NotFound, match=f"adapter a: there is no folder {source}"):
        load(store, 1, source)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)  # fmt: skip
def test_short_memory_may_pass(tmp_path: Path, error: Exception) -> None:
    class Short(RecordingModel):
        def fit(self, checkpoint: AdapterCheckpoint) -> Mapping[str, LayerWeights]:
            raise error

    kept = AdapterStore(LoraLimits(max_loras=1, max_rank=8, max_cpu_loras=1), Short())
    source = str(_write(tmp_path))
    with pytest.raises(Overloaded, match="no memory left for adapter a"):
        load(kept, 1, source)
    with pytest.raises(Unavailable, match="not on the host"):
        kept.place(1)
    kept._model = RecordingModel()
    load(kept, 1, source)


OLD, NEW = "1" * 40, "2" * 40


class Hub(http.server.ThreadingHTTPServer):
    """Has one adapter, `org/adapter`, at two commits; `main` is the newer one."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folders = {
            commit: _write(_made(root / commit), lora_alpha=alpha) for commit, alpha in ((OLD, 4), (NEW, 8))
        }
        self.down = False
        """Whether it answers 503 to everything."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/").split("/")
        if self.server.down:
            self.send_error(503)
        elif path[:4] == ["api", "models", "org", "adapter"]:
            self._describe(path[4:])
        elif path[:3] == ["org", "adapter", "resolve"] and path[3] in self.server.folders:
            self._send((self.server.folders[path[3]] / path[4]).read_bytes(), path[3], f"{path[3]}-{path[4]}")
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

    def do_HEAD(self) -> None:
        self.do_GET()

    def _describe(self, path: list[str]) -> None:
        commit = {"main": NEW, "v1": OLD}.get(path[1] if path else "main", path[1] if path else NEW)
        if commit not in self.server.folders:
            self.send_response(404)
            self.send_header("X-Error-Code", "RevisionNotFound")
            self.end_headers()
            return
        files = [self.server.folders[commit] / name for name in (CONFIG, WEIGHTS)]
        if path[0] == "tree":
            tree = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": f"{commit}-{file.name}"}
                for file in files
            ]  # fmt: skip
            self._send(json.dumps(tree).encode(), commit)
        else:
            siblings = [{"rfilename": file.name} for file in files]
            answer = {"id": "org/adapter", "sha": commit, "siblings": siblings}
            self._send(json.dumps(answer).encode(), commit)

    def _send(self, body: bytes, commit: str, etag: str = "") -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", commit)
        if etag:
            self.send_header("ETag", f'"{etag}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Writes nothing."""


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on this machine, and an empty cache."""
    with Hub(tmp_path) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")  # fmt: skip
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield server
        server.shutdown()


@pytest.mark.parametrize(
    ("source", "revision", "commit"),
    [
        ("org/adapter", "", NEW), ("org/adapter@v1", "", OLD), (f"org/adapter@{OLD}", "", OLD),
        ("org/adapter", OLD, OLD), ("org/adapter@main", OLD, OLD),
    ],
)  # fmt: skip
def test_an_id_stands_for_a_commit(hub: Hub, source: str, revision: str, commit: str) -> None:
    """That of its branch or tag when it is read first; a commit that is known is read again."""
    found = find_files(source, "a", revision)
    assert found.revision == commit
    assert (found.folder / CONFIG).read_bytes() == (hub.folders[commit] / CONFIG).read_bytes()


def test_the_store_says_which_commit_it_has(hub: Hub) -> None:
    """A host that reads the adapter later has the same, although the branch has moved."""
    store = AdapterStore(LoraLimits(max_loras=2, max_rank=8, max_cpu_loras=4), RecordingModel())
    first = load(store, 1, "org/adapter@v1")
    moved = load(store, 2, "org/adapter")
    again = load(store, 3, "org/adapter", first.revision)
    assert (first.revision, moved.revision, again.revision) == (OLD, NEW, OLD)
    assert first.digest == again.digest != moved.digest


@pytest.mark.parametrize(
    ("source", "text"),
    [("org/other", "the hub does not have it"), ("org/adapter@v9", "the hub does not have it")],
)
def test_what_the_hub_does_not_have_is_refused(hub: Hub, source: str, text: str) -> None:
    with pytest.raises(NotFound, match=text):
        find_files(source, "a")


def test_a_hub_that_is_down_may_come_back(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.down = True
    with pytest.raises(Unavailable, match="the hub cannot be reached; retry"):
        find_files("org/adapter", "a")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(Unavailable, match="the hub cannot be reached; retry"):
        find_files("org/adapter", "a")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(NotFound, match="HF_HUB_OFFLINE is set"):
        find_files("org/adapter", "a")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_a_cache_that_cannot_be_written_is_named(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The hub was reached, so the error names the cache and what to change; an operator may change it."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "makedirs", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    text = f"cannot write the hub's cache .{os.strerror(number)}.; .* set HF_HUB_CACHE to another folder"
    with pytest.raises(Unavailable, match=text):
        find_files("org/adapter", "a")


@pytest.mark.parametrize("revision", ["", "../../etc/passwd", "/etc/passwd", "a b"])
def test_odd_revisions_are_refused(revision: str) -> None:
    with pytest.raises(InvalidArgument, match="not a branch, tag or commit"):
        find_files(f"org/adapter@{revision}", "a")
