"""vLLM's configuration of one model, and its refusals in one line."""

import json
from pathlib import Path
from typing import Any, Literal

import torch

from protos.errors import ConfigurationRefused
from worker_svc.devices.base import Device
from worker_svc.settings import LoadFormat

# Said of a model whose classes are its own, and how to allow them.
_NEEDS_CODE = (
    "it needs Python code of its own (auto_map in config.json); pass --trust-remote-code if you trust it"
)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def configure(
    folder: Path, device: Device, *, dtype: Dtype, load_format: LoadFormat, seed: int, trust_remote_code: bool
) -> Any:
    """Makes vLLM's configuration of a model; for the arguments see ``VllmModel``.

    Raises:
        ConfigurationRefused: if nobody has such a class of model, or only the model itself has, and its code is not trusted.
    """
    from vllm.engine.arg_utils import EngineArgs

    register_model_class(folder, trust_remote_code=trust_remote_code)

    def configured(dtype: str) -> Any:
        return EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype=dtype,
            load_format="dummy" if load_format == "dummy" else "safetensors",
            seed=seed,
            trust_remote_code=trust_remote_code,
            use_tqdm_on_load=False,
            enforce_eager=True,
            block_size=device.default_block_size,
            disable_log_stats=True,
            enable_prefix_caching=False,
        ).create_engine_config()

    config = configured(dtype)
    if dtype == "auto" and _is_full_precision_pooling(config.model_config):
        return configured("float32")
    return config


def register_model_class(folder: Path, *, trust_remote_code: bool) -> None:
    """Registers the model's class as loaded, so that vLLM does not start a subprocess (seconds) to inspect it.

    Raises:
        ConfigurationRefused: if nobody has such a class, or only the model itself has, and its code is not trusted.
    """
    from vllm.model_executor.models import ModelRegistry

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for architecture in config.get("architectures") or ():
        known = ModelRegistry.models.get(architecture)
        if known is None:
            if config.get("auto_map"):
                if trust_remote_code:
                    continue  # vLLM makes a class of the model's own code
                raise ConfigurationRefused(f"cannot serve {folder}: {_NEEDS_CODE}")
            raise ConfigurationRefused(f"the architecture {architecture} is not one that vLLM knows")
        ModelRegistry.register_model(architecture, known.load_model_cls())


def _is_full_precision_pooling(model_config: Any) -> bool:
    """Whether vLLM would run a pooling model that was saved in float32 at half of that, which costs digits of its results."""
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    if model_config.runner_type != "pooling":
        return False
    saved = ModelArchConfigConvertorBase.get_torch_dtype(
        model_config.hf_config, model_config.model, None, "hf"
    )
    return bool(saved == torch.float32)


class one_line:  # noqa: N801 - reads as a clause
    """Turns what vLLM raises on a model or setting it cannot serve into a refusal of one line."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Translates."""
        if isinstance(error, ConfigurationRefused):
            raise error
        if isinstance(
            error, (ValueError, RuntimeError, OSError, KeyError, NotImplementedError, AttributeError)
        ):
            if "trust_remote_code" in str(error):
                raise ConfigurationRefused(f"{self._what}: {_NEEDS_CODE}") from error
            # pydantic puts the reason on the third line, behind where it was found.
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = next(
                (line for line in lines if line.startswith("Value error")), lines[0] if lines else ""
            )
            raise ConfigurationRefused(f"{self._what}: {reason or type(error).__name__}") from error
