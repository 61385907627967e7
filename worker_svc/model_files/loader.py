"""Resolves the `--model` setting to a folder, and lists the tokenizer files that other services need."""

from pathlib import Path

from protos.errors import ConfigurationRefused
from worker_svc.model_files import demo_models
from worker_svc.settings import LoadFormat

# Files of tokenizers, chat templates and prompts. The configurations tell transformers which class to use.
_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "config_sentence_transformers.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


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
        trust_remote_code: whether to fetch a hub model's Python files too.

    Raises:
        ConfigurationRefused: if there is no such model.
    """
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
        return _converted(path)
    if _is_path(model):
        what = "file" if path.suffix == ".gguf" else "folder"
        raise ConfigurationRefused(f"there is no {what} {model}; check --model")
    if model in demo_models.NAMES:
        try:
            return _resolve_folder(demo_models.fetch(model), load_format)
        except demo_models.FetchError as error:
            raise ConfigurationRefused(str(error)) from error
    if load_format == "gguf":
        raise ConfigurationRefused("--load-format gguf needs a local .gguf file as --model")
    patterns = [*_TOKENIZER_FILES]
    if load_format != "dummy":
        patterns += _WEIGHT_FILES
    if trust_remote_code:
        patterns.append("*.py")
    return _download(model, revision, patterns)


def is_missing(model: str, revision: str | None = None) -> bool:
    """Whether `resolve` would download the model."""
    if Path(model).expanduser().exists() or _is_path(model):
        return False
    if model in demo_models.NAMES:
        return not (demo_models.default_cache_dir() / model / "config.json").is_file()
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
    gguf = sorted(folder.glob("*.gguf"))
    is_complete = (folder / "config.json").is_file()
    if load_format == "gguf" or (load_format == "auto" and gguf and not is_complete):
        if len(gguf) == 1:
            return _converted(gguf[0])
        some = f"{len(gguf)} GGUF files; pass one of them as" if gguf else "no GGUF file; check"
        raise ConfigurationRefused(f"the folder {folder} has {some} --model")
    if not is_complete:
        raise ConfigurationRefused(
            f"the folder {folder} has no config.json; pass a Hugging Face folder as --model"
        )
    return folder


def _converted(gguf: Path) -> Path:
    try:
        return demo_models.convert(gguf)
    except demo_models.FetchError as error:
        raise ConfigurationRefused(str(error)) from error


def display_name(model: str) -> str:
    """Returns the name of a model for logs and clients: a hub id, or the name of the folder or file."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.absolute().name
    return path.stem if path.is_file() else model


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
