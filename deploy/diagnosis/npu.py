"""Checks of what only an NPU has: the vendor's packages, its name and its operators."""

import os
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.diagnosis.findings import Missing, Remark
from deploy.diagnosis.machine import importable

if TYPE_CHECKING:
    from worker_svc.devices.base import Device

_ADVICE = (
    "install rebel-compiler and torch-rbln from the vendor's index, or use --device cpu,"
    " or --rbln-backend rbln-check to try NPU graphs on this CPU"
)
_NEEDED = {"rebel": "rebel-compiler", "torch_rbln": "torch-rbln"}
_TARGET = "RBLN_TARGET_SOC"


def vendor_packages(*, triton: bool) -> str:
    """Returns the versions of the vendor's packages.

    Args:
        triton: whether attention runs in the vendor's Triton kernels, which are in a package of their own.

    Raises:
        Missing: names the missing ones.
    """
    return importable(_NEEDED | ({"vllm_rbln": "vllm-rbln"} if triton else {}), _ADVICE)


def target(*, compile_only: bool) -> str:
    """Returns for which NPU graphs are compiled.

    Raises:
        Missing: if no NPU answers and no variable names one.
        Remark: if the variable names one although an NPU is present.
    """
    named = os.environ.get(_TARGET)
    if compile_only:
        if not named:
            raise Missing(f"--compile-only needs the NPU's name: set {_TARGET}, for example to RBLN-CA25")
        return f"{named}, from {_TARGET}; no NPU is used"
    import rebel

    found = rebel.get_npu_name(0)
    if not found:
        raise Missing(
            "the driver reports no NPU (see `rbln-stat`); to compile without one, set"
            f" VLLM_RBLN_COMPILE_ONLY=1 and {_TARGET}"
        )
    if named and named != found:
        raise Remark(f"{found}; {_TARGET}={named} names another one: unset it")
    return str(found)


def operators(device: "Device") -> str:
    """Checks that the attention operators exist in the device's namespace.

    Raises:
        Missing: names what does not exist.
        Remark: if only the operator for expert layers is missing.
    """
    import torch

    from worker_svc.devices.rbln.device import RblnDevice
    from worker_svc.devices.rbln.ops.experts import OPERATOR
    from worker_svc.devices.rbln.ops.signatures import CUSTOM, SIGNATURES

    assert isinstance(device, RblnDevice)
    namespace = getattr(torch.ops, device.namespace)
    known = SIGNATURES[device.namespace]
    missing = [name for name in known if not hasattr(namespace, name)]
    if missing:
        raise Missing(
            f"{device.namespace} lacks {', '.join(missing)}; set RBLN_USE_CUSTOM_KERNEL to"
            f" {'1' if device.namespace == CUSTOM else '0'}, or install the versions in docs/npu.md"
        )
    if not hasattr(torch.ops.rbln_custom_ops, OPERATOR):
        raise Remark(
            f"{len(known)} attention operators, but no {OPERATOR}: for expert models set"
            " VLLM_RBLN_MOE_USE_OPT_KERNEL=0"
        )
    return f"{len(known)} attention operators and {OPERATOR} in {device.namespace}"


def weights() -> str:
    """Checks how Dynamo gives weights to the NPU's compiler.

    Raises:
        Remark: if each graph takes them as inputs. vllm-rbln 0.12.0 avoids that with a setting of Dynamo.
    """
    import torch
    from torch import _dynamo as dynamo

    if _num_inputs() == 1:
        return "constants of each graph"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated where it has no effect
        with dynamo.config.patch(inline_inbuilt_nn_modules=False):
            ignored = _num_inputs() > 1
    dynamo.reset()
    vendor = "vllm-rbln sets inline_inbuilt_nn_modules=False to make them constants, which this torch " + (
        "ignores" if ignored else "would follow"
    )
    raise Remark(
        f"inputs of each graph with torch {torch.__version__}; {vendor}: check that a second graph takes no"
        " second copy of the weights in the NPU's memory (see docs/npu.md)"
    )


def _num_inputs() -> int:
    """Returns how many inputs the graph of a linear layer has; 1 if its weights are constants."""
    import torch
    from torch import _dynamo as dynamo

    counts: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        counts.append(len(inputs))
        return graph.forward

    layer = torch.nn.Linear(8, 8, bias=False).requires_grad_(False)
    dynamo.reset()
    torch.compile(layer, backend=backend, dynamic=False, fullgraph=True)(torch.ones(1, 8))
    return counts[0]


def kept_code(device: "Device") -> str:
    """Checks that the compiler writes its code into the folder that it is given.

    Raises:
        Remark: if it writes none, so that every start compiles anew.
    """
    import torch

    with tempfile.TemporaryDirectory(prefix="triptych-code-") as folder:
        device.use_code_folder(Path(folder))
        with torch.inference_mode():
            device.compile(lambda states: states * 2)(torch.ones(8, 64))
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        device.use_code_folder(None)
    if not files:
        raise Remark("the compiler wrote no file for a graph: every start compiles anew; report this")
    return f"{len(files)} file{'s' if len(files) > 1 else ''} for a graph, kept for later starts"
