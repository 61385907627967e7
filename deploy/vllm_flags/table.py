"""The table of all flags of `vllm serve`."""

from typing import Final

from deploy.vllm_flags.engine import CACHE, COMPILATION, ENGINE, OBSERVABILITY, PARALLEL, SCHEDULER
from deploy.vllm_flags.flag import VllmFlag
from deploy.vllm_flags.frontend import FRONTEND
from deploy.vllm_flags.model import LORA, MODEL, MULTI_MODAL
from deploy.vllm_flags.older import OLDER
from deploy.vllm_flags.rbln import RBLN

VLLM_VERSION: Final = "0.32"
"""The version whose flags these are."""

FLAGS: Final[tuple[VllmFlag, ...]] = (
    *FRONTEND,
    *MODEL,
    *LORA,
    *MULTI_MODAL,
    *PARALLEL,
    *CACHE,
    *SCHEDULER,
    *COMPILATION,
    *OBSERVABILITY,
    *ENGINE,
)
"""Every flag of `vllm serve`, once."""

BY_NAME: Final = {name: flag for flag in (*FLAGS, *RBLN, *OLDER) for name in (flag.name, *flag.short)}
"""Each flag under all of its names, those of vLLM-RBLN and of earlier releases included."""
