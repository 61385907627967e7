"""What all ranks of a replica must have alike, so that their steps meet and they choose the same tokens."""

from worker_svc.devices.base import Device
from worker_svc.graphs.compilation import graph_options
from worker_svc.graphs.fingerprint import package_versions
from worker_svc.settings import Settings

# Flags that change which collectives a step runs, or what it computes.
_FLAGS = (
    "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype", "backend", "enable_warm_up", "compile_strict", "rbln_backend", "rbln_use_device_tensor",
    "rbln_num_devices_per_local_rank", "rbln_use_custom_kernel", "rbln_moe_use_opt_kernel", "rbln_moe_custom_kernel",
)  # fmt: skip


def rank_facts(settings: Settings, device: Device, dtype: str) -> dict[str, str]:
    """Returns the facts of this rank, by their names for people.

    Args:
        settings: the worker's.
        device: this rank's.
        dtype: of weights and activations.
    """
    options = graph_options(settings, device)
    flags = {f"--{name.replace('_', '-')}": str(getattr(settings, name)) for name in _FLAGS}
    return {
        "device": device.product_name(),
        "dtype": dtype,
        "-O": str(options.level),
        "candidate_compile_sizes": "all" if options.sizes is None else str(sorted(options.sizes)),
        **flags,
        **{
            f"version of {package}": version
            for package, version in package_versions(device, "triptych").items()
        },
    }
