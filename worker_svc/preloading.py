"""Imports everything that a worker with given settings imports, without a device and without weights."""

import importlib

from worker_svc import service  # noqa: F401 - most of a worker
from worker_svc.devices import choose_device
from worker_svc.model_files import loader
from worker_svc.settings import Settings
from worker_svc.vllm_adapter import startup
from worker_svc.vllm_adapter.configuration import register_model_class

# What a worker imports late, in functions.
_LATE = (
    "worker_svc.vllm_adapter.attention",
    "worker_svc.vllm_adapter.weights",
    "xgrammar",
)


def import_for(settings: Settings) -> None:
    """Imports the services' modules, vLLM with our platform, and the model's class.

    Opens no device: not even CUDA is initialized.

    Raises:
        ConfigurationRefused: if the model or vLLM is missing.
    """
    folder = loader.resolve(
        settings.model,
        settings.revision,
        load_format=settings.load_format,
        trust_remote_code=settings.trust_remote_code,
    )
    startup.prepare(choose_device(settings.device))
    register_model_class(
        folder,
        trust_remote_code=settings.trust_remote_code,
        language_model_only=settings.language_model_only,
    )
    for name in _LATE:
        importlib.import_module(name)
