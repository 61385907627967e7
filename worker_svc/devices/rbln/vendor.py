"""The vendor's packages: presence, facts about the NPU, compiler options.

`rebel` is the compiler and runtime, `torch_rbln` adds torch's device "rbln", and `vllm_rbln` declares the
Triton operators. The calls are vllm-rbln 0.12.0's.
"""

import functools
import importlib
import importlib.util
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from protos.errors import ConfigurationRefused, Unavailable
from protos.service.logs import get_logger
from worker_svc.devices.rbln.bound_graph import CallRecorder
from worker_svc.devices.registry import RBLN_PACKAGES, DeviceOptions

COMPILER: Final = "rebel.core.torch_compile"
"""The module with the backend for `torch.compile`."""
TARGET_VARIABLES: Final = ("RBLN_TARGET_SOC", "RBLN_FORCE_NPU_NAME")
"""Variables that tell the compiler its target."""
TRITON_MODULES: Final = (
    "vllm_rbln.v1.attention.ops.triton_causal_attention_naive",
    "vllm_rbln.v1.attention.ops.triton_flash_causal_attention",
    "vllm_rbln.v1.attention.ops.triton_sliding_window_attention_naive",
)
"""Importing these declares the Triton operators that `RblnDevice.plan` names."""
# By prefix of an NPU's name, its memory less the system's share (vllm-rbln 0.12.0, v1/worker/utils.py), for
# absent NPUs and drivers that cannot be asked.
_MEMORY = {"RBLN-CA": 16 * 2**30 - 288 * 2**20, "RBLN-CR": 144 * 2**30 - 4 * 2**30}
# Addresses of the hosts of rank 0 and of this rank, for the vendor's collectives.
_ADDRESSES = ("RBLN_ROOT_IP", "RBLN_LOCAL_IP")
# Several of these NPUs can work as one device.
_COMBINABLE = "RBLN-CA"


class Vendor:
    """The vendor's packages as this process uses them."""

    def __init__(self, options: DeviceOptions, calls: CallRecorder) -> None:
        """Imports nothing yet; `calls` notes those of compiled graphs."""
        self._options = options
        self._calls = calls
        self.runtimes: list[Any] = []
        """The runtimes of the graphs that were compiled with caches in the runtime's memory."""
        self.groups: dict[str, list[int]] = {}
        """By name, the ranks of the process groups that graphs' collectives name."""
        self._context: Any = None

    def check(self) -> None:
        """Imports the packages.

        Raises:
            ConfigurationRefused: names the missing part.
        """
        options = self._options
        if profiler := os.environ.get("VLLM_RBLN_PROFILER"):  # vLLM-RBLN's name of the runtime's variable
            os.environ.setdefault("RBLN_PROFILER", profiler)
        if missing := [name for name in RBLN_PACKAGES if importlib.util.find_spec(name) is None]:
            raise ConfigurationRefused(
                f"device rbln needs the vendor's packages {' and '.join(missing)}; use --device cpu or cuda"
            )
        if options.compile_only and not any(variable in os.environ for variable in TARGET_VARIABLES):
            raise ConfigurationRefused(
                f"compiling without an NPU needs its name; set {TARGET_VARIABLES[0]},"
                " for example to RBLN-CA25"
            )
        if options.compile_only:
            # Tensors of the NPU are then in this host's memory.
            os.environ.setdefault("RBLN_DUMMY_DEVICE", "1")
        if options.rbln_num_devices > 1:
            chip = self.chip()
            if not chip.upper().startswith(_COMBINABLE):
                raise ConfigurationRefused(
                    f"{chip} works alone; omit --rbln-num-devices-per-local-rank {options.rbln_num_devices}"
                )
            os.environ["RBLN_NPUS_PER_DEVICE"] = str(options.rbln_num_devices)
        if options.world_size > 1:
            # The vendor's collectives read these when their backend is made.
            os.environ |= {"LOCAL_RANK": str(options.rank), "WORLD_SIZE": str(options.world_size)}
            os.environ["RBLN_CTX_STANDALONE"] = "1"  # as vllm-rbln sets it for ranks
            if os.environ.get("RBLN_RUNTIME_FORCE_SYNC") == "1":
                get_logger().warning(
                    "rbln_runtime_synchronous", advice="unset RBLN_RUNTIME_FORCE_SYNC: it slows ranks"
                )
            if options.rbln_use_device_tensor:
                os.environ["RCCL_PORT_GEN"] = "1"
        if options.rbln_use_device_tensor:
            importlib.import_module("torch_rbln")
        # Declares the compiler's own operators; their schemas are read before the first graph.
        importlib.import_module(COMPILER)
        if options.rbln_use_custom_kernel:
            _declare_triton_operators()

    def chip(self) -> str:
        """Returns the NPU's name, for example "RBLN-CA25", from its sources in vllm-rbln's order.

        Raises:
            ConfigurationRefused: if no source has it.
        """
        name = None
        if not self._options.compile_only:
            import rebel

            name = rebel.get_npu_name(0)
        name = name or target()
        if not name:
            raise ConfigurationRefused(
                f"the NPU does not report its name; set {TARGET_VARIABLES[0]}, for example to RBLN-CA25"
            )
        return str(name)

    @functools.cached_property
    def memory_bytes(self) -> int:
        """The memory of this rank's NPUs, less the system's share, whether used or free.

        The number of blocks follows from it, and compiled code from that, so it must be the same at every
        start.

        Raises:
            ConfigurationRefused: if the NPU's memory size is unknown.
        """
        if self._options.rbln_use_device_tensor and not self._options.compile_only:
            try:
                _, total = importlib.import_module("torch_rbln.memory").mem_get_info()
                return int(total)
            except RuntimeError as error:  # an older driver
                reason = next(iter(str(error).splitlines()), "")
                get_logger().warning("npu_memory_estimated", reason=reason)
        chip = self.chip()
        known = next((size for name, size in _MEMORY.items() if chip.upper().startswith(name)), None)
        if known is None:
            raise ConfigurationRefused(f"the memory size of an {chip} is unknown; set --kv-memory")
        return known * self._options.rbln_num_devices

    def context(self) -> Any:
        """Returns the context of all graphs whose caches lie in the runtime's memory."""
        if self._context is None:
            import rebel

            self._context = rebel.CompileContext(use_weight_sharing=True, use_global_ctx=True)
        return self._context

    def forget_graphs(self) -> None:
        """Drops runtimes and context, and with them the memory that the runtime keeps for caches."""
        self.runtimes.clear()
        self._context = None

    def compile(
        self, function: Callable[..., torch.Tensor], folder: Path | None
    ) -> Callable[..., torch.Tensor]:
        """Returns a function that compiles a static graph for each new shape, with code in the folder."""
        return self._compiled(function, self._compile_options(folder))

    def compile_sampler(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Returns a function on device tensors that compiles a static graph for each shape.

        Like the plugin's sampler, it runs on a single NPU and keeps no code: the compiler cannot load it.
        """
        options = {"mode": self._modes(), "num_devices": 1, "model_trace_method": "export"}
        return self._compiled(function, options)

    def _compiled(
        self, function: Callable[..., torch.Tensor], options: dict[str, Any]
    ) -> Callable[..., torch.Tensor]:
        backend = self._calls.watch(importlib.import_module(COMPILER).rbln_backend)
        return torch.compile(function, backend=backend, dynamic=False, fullgraph=True, options=options)

    def _modes(self) -> list[str]:
        modes = {"strict": self._options.compile_strict, "compile_only": self._options.compile_only}
        return [name for name, enabled in modes.items() if enabled]

    def _compile_options(self, folder: Path | None) -> dict[str, Any]:
        given = self._options
        options: dict[str, Any] = {
            # Steps of one signature differ in their tensors' contents alone; shapes distinguish signatures.
            "guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe,
            "mode": self._modes(),
            "num_devices": given.rbln_num_devices,
        }
        if given.rbln_use_device_tensor:
            # Results are copied to the host before the next call of their graph.
            options |= {"model_trace_method": "export", "use_static_output": True}
        else:
            options |= {"compile_context": self.context(), "_runtime_holder": self.runtimes}
        if self.groups:
            options["process_group_dict"] = self.groups
        if folder is not None:
            options["cache_dir"] = str(folder)
        return options


def target() -> str | None:
    """Returns the NPU that the environment names for the compiler."""
    return next((os.environ[name] for name in TARGET_VARIABLES if name in os.environ), None)


def use_addresses(master: str) -> None:
    """Sets RBLN_ROOT_IP and RBLN_LOCAL_IP, the hosts of rank 0 and of this rank, unless they are set.

    torch_rbln would take 127.0.0.1, where ranks of several hosts never meet.

    Args:
        master: host:port of rank 0.

    Raises:
        Unavailable: if the host has no IPv4 address, or no route leads there.
    """
    host, _, port = master.rpartition(":")
    if all(os.environ.get(name, "").strip() for name in _ADDRESSES):
        return
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((host, int(port)))  # sends nothing
            found = (route.getpeername()[0], route.getsockname()[0])
    except OSError as error:
        raise Unavailable(
            f"NPUs need an IPv4 address of rank 0, and {host} leads to none ({error.strerror or error});"
            f" change --master, or set {' and '.join(_ADDRESSES)}"
        ) from error
    for name, address in zip(_ADDRESSES, found, strict=True):
        if not os.environ.get(name, "").strip():
            os.environ[name] = address


def _declare_triton_operators() -> None:
    for name in TRITON_MODULES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigurationRefused(
                f"RBLN_USE_CUSTOM_KERNEL=1 needs the operators of {name} ({error});"
                " install vllm-rbln without its dependencies, or set RBLN_USE_CUSTOM_KERNEL=0"
            ) from error
