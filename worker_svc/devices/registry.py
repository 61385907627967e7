"""All supported devices and their differences before a device is opened. Imports no torch."""

import importlib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from protos.service.logs import get_logger

DeviceName = Literal["cpu", "cuda", "rbln"]
DeviceSetting = Literal["auto", DeviceName]
"""The setting `--device`; see `choose_device`."""
RblnBackend = Literal["rbln", "rbln-check"]
"""The setting `--rbln-backend`."""


@dataclass(frozen=True)
class DeviceSpec:
    """A supported device."""

    name: DeviceName
    """As in the setting and on the wire."""
    implementation: str
    """Module and class of the `Device`, as `pkgutil.resolve_name` reads them."""
    vllm_platform: str
    """Class in `vllm_adapter.platform`."""
    torch_type: str = "cpu"
    """Torch's device of the model's tensors, for vLLM."""
    has_vllm_kernels: bool = False
    """Whether vLLM's compiled kernels and its own layers run the model."""
    expands_latent: bool = False
    """Whether attention kernels need the keys and values of all heads, so that vLLM must expand latent
    vectors (MLA) before them."""
    reads_vllm_kv_space: bool = False
    """Whether VLLM_CPU_KVCACHE_SPACE is the size of its KV cache."""
    draws_tokens: bool = False
    """Whether it can draw the tokens of requests without a seed."""
    visible_by: tuple[str, ...] = ()
    """Variables that list the devices of a process, the preferred variable first; empty if all processes
    share the device."""
    is_exclusive: bool = False
    """Whether a device serves a single process. Other devices may be shared if there are too few."""


CPU: Final = DeviceSpec(
    "cpu",
    "worker_svc.devices.cpu.device:CpuDevice",
    "TriptychCpuPlatform",
    has_vllm_kernels=True,
    reads_vllm_kv_space=True,
)
CUDA: Final = DeviceSpec(
    "cuda",
    "worker_svc.devices.cuda.device:CudaDevice",
    "TriptychCudaPlatform",
    torch_type="cuda",
    visible_by=("CUDA_VISIBLE_DEVICES",),
)
RBLN: Final = DeviceSpec(
    "rbln",
    "worker_svc.devices.rbln.device:RblnDevice",
    "TriptychRblnPlatform",
    expands_latent=True,
    draws_tokens=True,
    # The vendor's runtime prefers the older name, which all its releases know.
    visible_by=("RBLN_DEVICES", "RBLN_VISIBLE_DEVICES"),
    is_exclusive=True,
)
RBLN_PACKAGES: Final = ("rebel", "torch_rbln")
"""The vendor's packages for NPUs: compiler and runtime, and torch's device."""
DEVICES: Final[Mapping[str, DeviceSpec]] = MappingProxyType({spec.name: spec for spec in (CPU, CUDA, RBLN)})


@dataclass(frozen=True)
class DeviceOptions:
    """Settings that only some devices use."""

    rbln_backend: RblnBackend = "rbln"
    """The compiler of an NPU's graphs; see the setting of that name."""
    rbln_use_custom_kernel: bool = False
    """Whether an NPU's attention runs in Triton kernels."""
    rbln_use_device_tensor: bool = True
    """Whether weights, inputs and caches of an NPU's graphs are tensors on it."""
    rbln_num_devices: int = 1
    """NPUs combined into a device."""
    compile_only: bool = False
    """Compile for a device absent from this machine."""
    compile_strict: bool = False
    """Make the device's own compiler refuse graphs that it would otherwise split."""
    rbln_moe_use_opt_kernel: bool = True
    """Whether an NPU's expert layers use the vendor's operator."""
    rbln_moe_custom_kernel: bool = False
    """Requests the same operator under the plugin's other name for it."""
    sampling_on_device: bool = False
    """Whether an NPU draws the tokens of requests without a seed."""
    local_rank: int = 0
    """Index of the process' device among those of its host, modulo their number."""
    rank: int = 0
    """This process among those of its replica."""
    world_size: int = 1
    """Processes of the replica."""
    cpu_threads: int | None = None
    """Threads of kernels on the host; `None` for torch's default."""

    @property
    def is_simulated(self) -> bool:
        """Whether the host takes the place of an NPU."""
        return self.rbln_backend == "rbln-check"


def choose_device(setting: DeviceSetting) -> DeviceName:
    """Returns the device of a setting.

    `auto` is an NPU if present, else a GPU, else the CPU; it imports torch.
    """
    if setting != "auto":
        return setting
    if _has_npu():
        return RBLN.name
    # Asks the driver's management library, which leaves CUDA uninitialized in this process.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    return CUDA.name if torch.cuda.is_available() else CPU.name


def may_have_npus() -> bool:
    """Whether the vendor's packages are installed, without which no NPU can be used. Imports nothing."""
    return all(importlib.util.find_spec(name) is not None for name in RBLN_PACKAGES)


def _has_npu() -> bool:
    """Whether the vendor's runtime finds an NPU. Imports nothing without the vendor's packages."""
    if not may_have_npus():
        return False
    try:
        npus = importlib.import_module("torch_rbln").device
        # The count of logical devices would fix which NPUs form one, before a setting says so.
        return npus.is_available() and npus.physical_device_count() > 0 and not npus.is_dummy_device()
    except (AttributeError, ImportError, OSError, RuntimeError) as error:  # such as another version's library
        reason = next(iter(str(error).splitlines()), "")
        get_logger().warning("npu_unusable", reason=reason, advice="triptych doctor --device rbln")
        return False
