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
from worker_svc.lora.store import AdapterStore, find_files


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
    return AdapterStore(LoraLimits(max_loras=2, max_rank=8, max_cpu_loras=2), RecordingModel())


def test_an_adapter_is_read_once(store: AdapterStore, tmp_path: Path) -> None:
    """The same id, name and source is the same adapter; another source is read."""
    first = store.load(1, "a", str(_write(tmp_path)))
    assert first.rank == 4
    assert first.num_bytes == 4 * (4 * 6 + 10 * 4)
    assert store.load(1, "a", str(tmp_path)) is first
    (tmp_path / "other").mkdir()
    other = _write(tmp_path / "other", _tensors(rank=4), lora_alpha=1)
    assert store.load(1, "a", str(other)).digest != first.digest


def test_the_host_holds_so_many(store: AdapterStore, tmp_path: Path) -> None:
    """Above --max-cpu-loras, nothing is loaded until something is unloaded."""
    source = str(_write(tmp_path))
    store.load(1, "a", source)
    store.load(2, "b", source)
    with pytest.raises(Overloaded, match="holds 2 adapters, as many as --max-cpu-loras allows"):
        store.load(3, "c", source)
    store.unload(1)
    store.unload(1)
    store.load(3, "c", source)
    store.forget()
    store.load(4, "d", source)


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
        kept.load(1, "a", source)
    kept._model = RecordingModel()
    kept.load(2, "b", source)


@pytest.mark.parametrize("source", ["~nosuchuser/x", "/" + 3000 * "x/"])
def test_odd_sources(store: AdapterStore, source: str) -> None:
    """A path that the system refuses is the client's mistake."""
    with pytest.raises((InvalidArgument, NotFound), match="adapter a"):
        store.load(1, "a", source)


def test_placing(store: AdapterStore, tmp_path: Path) -> None:
    """Only adapters on the host are placed, in slots that exist; the end of the plans empties the slots."""
    store.load(5, "a", str(_write(tmp_path)))
    store.place(1, 5)
    model: Any = store._model
    assert set(model.placed[1]) == {PATH}
    store.check_placed(1)
    for slot, adapter_id, text in ((2, 5, "there are 2 slots"), (-1, 5, "there are 2"), (0, 6, "adapter 6")):
        with pytest.raises(Internal, match=text):
            store.place(slot, adapter_id)
    with pytest.raises(Internal, match="adapter slot 0, which is empty"):
        store.check_placed(0)
    store.unload(5)
    store.check_placed(1)  # what is on the device stays
    store.forget_placements()
    with pytest.raises(Internal, match="slot 1, which is empty"):
        store.check_placed(1)


@pytest.mark.parametrize("source", ["/nowhere/adapter", "./nowhere", "nowhere", "a/b/c"])
def test_missing_folders(store: AdapterStore, source: str) -> None:
    """A source that is neither a folder nor an id is named."""
    with pytest.raises(NotFound, match=f"adapter a: there is no folder {source}"):
        store.load(1, "a", source)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)  # fmt: skip
def test_short_memory_may_pass(tmp_path: Path, error: Exception) -> None:
    """The adapter is not at fault: the scheduler tries again."""

    class Short(RecordingModel):
        def fit(self, checkpoint: AdapterCheckpoint) -> Mapping[str, LayerWeights]:
            raise error

    kept = AdapterStore(LoraLimits(max_loras=1, max_rank=8, max_cpu_loras=1), Short())
    source = str(_write(tmp_path))
    with pytest.raises(Overloaded, match="no memory left for adapter a"):
        kept.load(1, "a", source)
    with pytest.raises(Internal, match="not on the host"):
        kept.place(0, 1)
    kept._model = RecordingModel()
    kept.load(1, "a", source)


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
    first = store.load(1, "a", "org/adapter@v1")
    moved = store.load(2, "a", "org/adapter")
    again = store.load(3, "a", "org/adapter", first.revision)
    assert (first.revision, moved.revision, again.revision) == (OLD, NEW, OLD)
    assert first.digest == again.digest != moved.digest


@pytest.mark.parametrize(
    ("source", "text"),
    [("org/other", "the hub does not have it"), ("org/adapter@v9", "the hub does not have it")],
)
def test_what_the_hub_does_not_have_is_refused(hub: Hub, source: str, text: str) -> None:
    """For good: no host tries again."""
    with pytest.raises(NotFound, match=text):
        find_files(source, "a")


def test_a_hub_that_is_down_may_come_back(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error may be retried. Without a connection by choice, it may not."""
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
    """None of them leaves the hub's cache."""
    with pytest.raises(InvalidArgument, match="not a branch, tag or commit"):
        find_files(f"org/adapter@{revision}", "a")
