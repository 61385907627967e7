"""Uses device rbln with the vendor's packages: `python -m tests.support.rbln.vendor_process`.

The output is a JSON object: what each function here returns, by its name.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from protos.errors import TriptychError
from protos.steps import BlockCopy, GroupKind
from worker_svc.devices.rbln.device import RblnDevice
from worker_svc.devices.rbln.vendor import TRITON_MODULES
from worker_svc.devices.registry import DeviceOptions
from worker_svc.execution.kv_cache import KvCache
from worker_svc.shapes import AttentionLayer, KvGroup

BLOCK, HEADS, SIZE = 8, 2, 4
FULL = KvGroup(
    0, tuple(AttentionLayer(name, HEADS, HEADS, SIZE, 0, torch.float32) for name in "ab"), GroupKind.FULL
)
WINDOW = KvGroup(1, (AttentionLayer("w", HEADS, HEADS, SIZE, 4, torch.float32),), GroupKind.IN_PLACE_WINDOW)


def opened(**options: Any) -> RblnDevice:
    device = RblnDevice(DeviceOptions(**options))
    device.check_available()
    return device


def refusal(function: Callable[..., Any], *arguments: Any) -> str:
    """Returns the first line of the error that a call ends with."""
    try:
        function(*arguments)
    except TriptychError as error:
        return error.message
    except Exception as error:  # noqa: BLE001 - the vendor's compiler raises anything
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return next((line for line in lines if "rebel:" in line), lines[0])
    return "nothing was refused"


def copies() -> Iterator[dict[str, Any]]:
    """Yields, for both namespaces, what blocks hold after a copy and a clearing."""
    for triton in (False, True):
        device = opened(rbln_use_custom_kernel=triton)
        cache = KvCache(device, [FULL], BLOCK, [4])
        tensors = list(cache.by_layer().values())
        fresh = bool(torch.stack([each.cpu() for each in tensors]).any())
        numbers = torch.arange(tensors[0].numel(), dtype=torch.float32).view(tensors[0].shape) + 1
        for each in tensors:
            each.copy_(numbers)
        cache.copy([BlockCopy(0, 1, 3, 5)])
        cache.clear(0, [2])
        source = numbers.select(device.block_dim, 1)
        for each in tensors:
            target = each.cpu().select(device.block_dim, 3)
            yield {
                "device": each.device.type,
                "fresh": fresh,
                "copied": torch.equal(target[..., :5, :], source[..., :5, :]),
                "rest": bool(target[..., 5:, :].any()),
                "cleared": not each.cpu().select(device.block_dim, 2).any(),
                "untouched": torch.equal(
                    each.cpu().select(device.block_dim, 0), numbers.select(device.block_dim, 0)
                ),
                "announced": device.block_copies([FULL]),
            }


def runtime_copies() -> dict[str, Any]:
    """The older way: what the device announces, and what the runtime's call copies."""
    device = opened(rbln_use_device_tensor=False)
    cache = KvCache(device, [FULL], BLOCK, [4])
    (first, second) = cache.by_layer().values()
    expected = device.block_copies([FULL])
    early = refusal(cache.copy, [BlockCopy(0, 1, 3, 5)])

    def writing(numbers: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        one.copy_(numbers)
        other.copy_(numbers + 1)
        return numbers * 2

    def reading(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.stack((one, other)) * 1

    numbers = torch.arange(first.numel(), dtype=torch.float32).view(first.shape)
    device.compile(writing)(numbers, first, second)
    cache.copy([BlockCopy(0, 1, 3, 5)])
    held = device.compile(reading)(first, second).cpu()
    answer = {
        "expected": expected,
        "groups": device.block_copies([FULL, WINDOW]),
        "early": early,
        "copied": torch.equal(held[:, 3, ..., :5, :], held[:, 1, ..., :5, :]),
        "rest": torch.equal(held[0, 3, ..., 5:, :], numbers[3, ..., 5:, :]),
        "ready": device.block_copies([FULL]),
    }
    del device._vendor.runtimes[0].__class__._copy_kv_cache
    answer["without_the_call"] = device.block_copies([FULL])
    device.release_unused()
    answer["released"] = device.block_copies([FULL])
    return answer


def weights() -> dict[str, Any]:
    """A tied parameter stays one, and graphs read weights on the NPU."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model.register_buffer("shift", torch.ones(3))
    inputs = torch.randn(2, 3)
    with torch.no_grad():
        expected = model(inputs) + model.shift
    device = opened()
    held = model[1].bias
    device.place_weights(model)
    run = device.compile(lambda x: model(x) + model.shift)
    with torch.inference_mode():
        got = run(inputs)
    return {
        "devices": sorted({each.device.type for each in (*model.parameters(), *model.buffers())}),
        "held": held.device.type,
        "tied": model[0].weight is model[1].weight,
        "equal": torch.equal(got.cpu(), expected),
        "result": got.device.type,
        "eager": refusal(lambda: model[0].weight.add(1)),
    }


def refusals() -> dict[str, str]:
    """What the compiler refuses, and what a worker refuses before it compiles."""
    os.environ["RBLN_NPUS_PER_DEVICE"] = "1"
    two = opened(rbln_num_devices=2)
    answer = {"two": f"{os.environ['RBLN_NPUS_PER_DEVICE']}, {two.code_target()}"}
    os.environ["STUB_RBLN_NPU"] = "RBLN-CR13"
    answer["alone"] = refusal(lambda: opened(rbln_num_devices=2))
    os.environ["STUB_RBLN_NPU"] = ""
    answer["no_name"] = refusal(lambda: opened().code_target())
    answer["no_target"] = refusal(lambda: opened(compile_only=True))
    os.environ["RBLN_TARGET_SOC"] = "RBLN-CA25"
    blind = opened(compile_only=True, compile_strict=True)
    answer["blind"] = (
        f"{blind.code_target()}: {blind.compile(lambda x: x + 6)(torch.ones(3, 3)).cpu().isnan().all()}"
    )
    del os.environ["STUB_RBLN_NPU"], os.environ["RBLN_TARGET_SOC"]
    sys.modules[TRITON_MODULES[-1]] = None  # type: ignore[assignment]
    answer["triton"] = refusal(lambda: opened(rbln_use_custom_kernel=True))
    return answer


def sampler() -> dict[str, Any]:
    """The most probable tokens of logits on the NPU, and the options of their graph."""
    from rebel.core import torch_compile

    options: list[Any] = []
    check = torch_compile._check_options
    torch_compile._check_options = options.append
    logits = torch.randn(3, 50)
    device = opened(compile_strict=True)
    device.use_code_folder(Path("/nowhere"))
    argmax = device.compile_argmax()
    assert argmax is not None
    tokens = argmax(logits.to("rbln"))
    torch_compile._check_options = check
    return {
        "device": tokens.device.type,
        "equal": tokens.tolist() == logits.argmax(dim=-1).tolist(),
        "options": options,
        "meta": opened(rbln_use_device_tensor=False).compile_argmax() is None,
    }


def compile_cache() -> list[int]:
    """Returns the number of files after graphs were compiled, after a restart, and after another shape."""
    counts = []
    with tempfile.TemporaryDirectory() as folder:
        for rows in (2, 2, 3):
            device = opened()
            device.use_code_folder(Path(folder))
            torch.compiler.reset()
            device.compile(lambda x: x * 2)(torch.ones(rows))
            counts.append(len(list(Path(folder).iterdir())))
    return counts


def failures() -> dict[str, Any]:
    """Errors of compiler and runtime while torch_rbln may run functions on the host, and where they ran."""
    from rebel.core import torch_compile

    places: list[str] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            places.append("host")
        return x * 3 + 1

    def run(runtime: Any, *inputs: Any) -> Any:
        places.append("npu")
        if places.count("npu") > 1:
            raise RuntimeError("rebel: the device is gone")
        return whole(runtime, *inputs)

    fallback = os.environ.pop("TORCH_RBLN_DISABLE_FALLBACK")
    whole, torch_compile.Runtime.run = torch_compile.Runtime.run, run
    refused = refusal(opened().compile(function), torch.ones(4).to("rbln")[2:])
    places_refused = places.copy()
    step = opened().compile(function)
    with torch.inference_mode():
        first = step(torch.ones(5)).tolist()
        failed = refusal(step, torch.ones(5))
    torch_compile.Runtime.run = whole
    os.environ["TORCH_RBLN_DISABLE_FALLBACK"] = fallback
    return {
        "refused": refused,
        "places_refused": places_refused,
        "first": first,
        "failed": failed,
        "places": places,
    }


def main() -> None:
    """Prints what every function returns."""
    print(
        json.dumps(
            {
                "copies": list(copies()),
                "weights": weights(),
                "sampler": sampler(),
                "compile_cache": compile_cache(),
                "runtime_copies": runtime_copies(),
                "failures": failures(),
                "refusals": refusals(),
            }
        )
    )


if __name__ == "__main__":
    main()
