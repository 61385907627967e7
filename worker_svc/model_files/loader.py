"""Finds a model's folder, and the files of it that other services need."""

from pathlib import Path

from protos.errors import ConfigurationRefused
from worker_svc.model_files import demo_models as models
from worker_svc.settings import LoadFormat

# What a tokenizer and a chat template are made of; the configurations tell transformers which class to use.
_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
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
    """The folder of a model: a local one as it is, a GGUF file converted, a packaged demo model or a hub model fetched.

    Args:
        model: a folder, a GGUF file, a packaged model's name, or a Hugging Face id.
        revision: branch, tag or commit of a hub model.
        load_format: what the weights are stored as; "auto" takes safetensors where there are any.
        trust_remote_code: whether a hub model's Python files are fetched too.

    Raises:
        ConfigurationRefused: in one line, why there is no such model here.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _of_folder(path, load_format).absolute()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigurationRefused(
                f"{model} is a file; --model wants a Hugging Face folder or id, or a .gguf file"
            )
        if load_format not in ("auto", "gguf"):
            raise ConfigurationRefused(
                f"{model} is a GGUF file; --load-format {load_format} does not suit it"
            )
        return _converted(path)
    if model.startswith(("/", ".", "~")) or model.count("/") > 1 or path.suffix == ".gguf":
        what = "file" if path.suffix == ".gguf" else "folder"
        raise ConfigurationRefused(f"there is no {what} {model}; check --model")
    if model in models.NAMES:
        try:
            return models.fetch(model)
        except models.FetchError as error:
            raise ConfigurationRefused(str(error)) from error
    if load_format == "gguf":
        raise ConfigurationRefused("--load-format gguf wants a .gguf file of this machine as --model")
    patterns = [*_TOKENIZER_FILES]
    if load_format != "dummy":
        patterns += _WEIGHT_FILES
    if trust_remote_code:
        patterns.append("*.py")
    return _download(model, revision, patterns)


def _of_folder(folder: Path, load_format: LoadFormat) -> Path:
    gguf = sorted(folder.glob("*.gguf"))
    is_complete = (folder / "config.json").is_file()
    if load_format == "gguf" or (load_format == "auto" and gguf and not is_complete):
        if len(gguf) == 1:
            return _converted(gguf[0])
        some = f"{len(gguf)} GGUF files; name one of them as" if gguf else "no GGUF file; check"
        raise ConfigurationRefused(f"the folder {folder} has {some} --model")
    if not is_complete:
        raise ConfigurationRefused(
            f"the folder {folder} has no config.json; --model wants a Hugging Face folder"
        )
    return folder


def _converted(gguf: Path) -> Path:
    try:
        return models.convert(gguf)
    except models.FetchError as error:
        raise ConfigurationRefused(str(error)) from error


def display_name(model: str) -> str:
    """What to call a model towards others: a hub id, or a folder's or a file's own name."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.absolute().name
    return path.stem if path.is_file() else model


def tokenizer_files(folder: Path) -> list[Path]:
    """Files of a model's folder that a tokenizer needs, by name in ascending order."""
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
            f"{model} has no config.json on the hub; it is not a model that can be served"
        )
    return folder
