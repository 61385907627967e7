"""How vLLM finds our platform: the target of the entry point ``vllm.platform_plugins``.

vLLM calls :func:`register` in every process that imports it, also in those that have nothing to do with Triptych (somebody's
``vllm serve`` in the same environment) and in the subprocess in which vLLM inspects model classes. So this module imports nothing,
and an environment variable, which subprocesses inherit, says whether a worker asked for us.
"""

import os
from typing import Final

# Set by `vllm_adapter.prepare` alone; not a setting for people.
PLATFORM_VARIABLE: Final = "TRIPTYCH_VLLM_PLATFORM"

_PLATFORMS: Final = {
    "cpu": "worker_svc.vllm_adapter.platform.TriptychCpuPlatform",
    "cuda": "worker_svc.vllm_adapter.platform.TriptychCudaPlatform",
    "rbln": "worker_svc.vllm_adapter.platform.TriptychRblnPlatform",
}


def register() -> str | None:
    """The import path of our platform class, or ``None`` where this process is not one of our workers."""
    return _PLATFORMS.get(os.environ.get(PLATFORM_VARIABLE, ""))
