"""Set-up of processes that import vLLM: the entry point `vllm.platform_plugins`, and quiet logs.

vLLM calls `register` in every process that imports it. That includes processes without a worker (`vllm
serve` in the same environment) and the subprocess in which vLLM inspects model classes. So this module
imports almost nothing, and an environment variable, which subprocesses inherit, tells whether a worker runs.
"""

import logging
import os
import warnings
from typing import Final

from worker_svc.devices.registry import DEVICES

# Set by vllm_adapter.startup only; not a user setting.
PLATFORM_VARIABLE: Final = "TRIPTYCH_VLLM_PLATFORM"


def register() -> str | None:
    """Returns the import path of the platform class, or `None` if this process is not a worker."""
    spec = DEVICES.get(os.environ.get(PLATFORM_VARIABLE, ""))
    return None if spec is None else f"worker_svc.vllm_adapter.platform.{spec.vllm_platform}"


def prepare_libraries() -> None:
    """Silences libraries except for errors, and keeps torch_rbln off the CPU.

    Call it before torch, vLLM and transformers are imported: torch imports an installed torch_rbln, which
    decides then about operators that it lacks.
    """
    for name in ("vllm", "transformers", "torch", "torch._library.triton", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TORCH_RBLN_DISABLE_FALLBACK", "all")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", module=r"(vllm|transformers|torch)\b")
