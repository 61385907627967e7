"""Compares models with quantized weights with the same model in bfloat16: decode steps and perplexity.

``python -m tests.bench.quantized [--quick] [--model smollm2|gemma3-270m]`` makes both kinds of quantized
folders as `triptych quantize` does, runs all models in this process on all cores, and times decode
steps of 1, 8 and 32 rows, the models in turn, step by step. Without `--quick`, one more model has W4A16
weights that `triptych quantize --calibrate` made, which takes minutes. Perplexity is that of
`tests/bench/support/quantized_text.txt`. Then it times the products of all projections (W4A16, groups of 64)
in our kernel and, in turn, in that of vLLM's CPU wheel.

With ``--device cuda`` the model has the shape of Llama 3.2 1B, with made-up weights and codes: groups of 64
or a scale per channel, and the output head in 8 bits.
"""

import argparse
import functools
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer

from tests.bench.support.report import exit_code, parser, report
from tests.support.sampling_params import sampling_params
from tests.support.worker.harness import Harness, random_prompt
from worker_svc.devices import open_device
from worker_svc.devices.base import Device
from worker_svc.devices.quantized import QuantizedWeights
from worker_svc.model_files.loader import fetch
from worker_svc.model_files.quantize import (
    HEAD,
    Calibration,
    quantize_folder,
)
from worker_svc.quantized import codes
from worker_svc.quantized.checkpoint_config import quantization_config, quantization_group
from worker_svc.quantized.codes import Scheme, quantize
from worker_svc.vllm_adapter import startup
from worker_svc.vllm_adapter.model import VllmModel

PLAIN: Final = "bf16"
SCHEMES: Final = {"w8a16": Scheme(8, None), "w4a16": Scheme(4, 64)}
CALIBRATED: Final = "w4a16_calibrated"
BUCKETS: Final = (1, 8, 32)
TEXT: Final = Path(__file__).parent / "support" / "quantized_text.txt"
_CHUNK: Final = 128
_MAX_LEN: Final = 2048
_WARM_UP_STEPS: Final = 3
_GPU_CONTEXT: Final = 200
# Outputs and inputs of SmolLM2's projections, for all of its layers.
_LAYER_SHAPES: Final = ((960, 576), (576, 576), (3072, 576), (576, 1536))
_LAYERS: Final = 30


def _folders(source: Path, scratch: Path, *, calibrate: bool) -> dict[str, Path]:
    folders = {PLAIN: source}
    for name, scheme in SCHEMES.items():
        folders[name] = scratch / name
        quantize_folder(source, folders[name], scheme, head=True)
    if calibrate:
        folders[CALIBRATED] = scratch / CALIBRATED
        started = time.monotonic()
        quantize_folder(source, folders[CALIBRATED], SCHEMES["w4a16"], head=True, calibration=Calibration())
        print(f"calibrated in {time.monotonic() - started:.0f} s", file=sys.stderr)
    return folders


def _harness(folder: Path, device: Device) -> Harness:
    model = VllmModel(folder, device, dtype="bfloat16", seed=0)
    model.load_weights()
    print(f"{folder.name}: {model.size.weight_bytes / 1e6:.0f} MB of weights", file=sys.stderr)
    return Harness(
        model, max_model_len=_MAX_LEN, max_num_seqs=max(BUCKETS), chunk=_CHUNK, decode_buckets=BUCKETS, device=device
    )  # fmt: skip


def _steps(harnesses: Mapping[str, Harness], bucket: int, count: int) -> dict[str, float]:
    """Returns each model's median milliseconds per decode step; the models run in turn."""
    taken: dict[str, list[float]] = {name: [] for name in harnesses}
    for harness in harnesses.values():
        for slot in range(bucket):
            harness.prefill(slot, random_prompt(slot, _CHUNK))
    for step in range(_WARM_UP_STEPS + count):
        for name, harness in harnesses.items():
            started = time.perf_counter()
            harness.decode(range(bucket), bucket)
            if step >= _WARM_UP_STEPS:
                taken[name].append(time.perf_counter() - started)
    for harness in harnesses.values():
        harness.release(range(bucket))
    return {name: 1000 * statistics.median(seconds) for name, seconds in taken.items()}


def perplexity(harness: Harness, token_ids: list[int]) -> float:
    """Returns the perplexity of a text, from the log-probabilities of its tokens after the first."""
    output = harness.prefill(0, token_ids, sampling_params(temperature=0.0, prompt_logprobs=0))
    harness.release((0,))
    logprobs = [entry.logprob for entry in output.prompt_logprobs]
    assert len(logprobs) == len(token_ids) - 1
    return math.exp(-sum(logprobs) / len(logprobs))


def _peer_layer(weights: QuantizedWeights) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the product of vLLM's own W4A16 path for CPUs."""
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
    from vllm.model_executor.parameter import GroupQuantScaleParameter, PackedvLLMParameter
    from vllm.scalar_type import scalar_types

    outputs, inputs = weights.codes.shape
    config = MPLinearLayerConfig(
        full_weight_shape=(inputs, outputs), partition_weight_shape=(inputs, outputs),
        weight_type=scalar_types.uint4b8, act_type=torch.bfloat16,
        group_size=inputs // weights.scales.shape[1], zero_points=False,
    )  # fmt: skip
    layer: Any = torch.nn.Module()
    layer.bias = None
    words = codes.pack(weights.codes, weights.bits)
    layer.weight_packed = PackedvLLMParameter(
        data=words, input_dim=1, output_dim=0, packed_dim=1, packed_factor=8, weight_loader=print
    )
    layer.weight_scale = GroupQuantScaleParameter(
        data=weights.scales.bfloat16(), input_dim=1, output_dim=0, weight_loader=print
    )
    kernel = CPUWNA16LinearKernel(config, w_q_param_name="weight_packed", w_s_param_name="weight_scale")
    kernel.process_weights_after_loading(layer)
    return lambda x: kernel.apply_weights(layer, x)


def _products(device: Device, repetitions: int) -> dict[str, dict[str, float]]:
    """Returns median milliseconds of the products of SmolLM2's projections, by rows, ours and vLLM's."""
    made: dict[str, list[tuple[int, Callable[[torch.Tensor], torch.Tensor]]]] = {"ours": [], "vllm": []}
    for _ in range(_LAYERS):
        for outputs, inputs in _LAYER_SHAPES:
            found, scales = quantize(torch.randn(outputs, inputs).bfloat16(), SCHEMES["w4a16"])
            weights = QuantizedWeights(found, scales, 4)
            ours = device.quantized.layer(weights, torch.bfloat16, wide=False)
            made["ours"].append((inputs, functools.partial(ours, bias=None)))
            made["vllm"].append((inputs, _peer_layer(weights)))
    products: dict[str, dict[str, float]] = {}
    for rows in BUCKETS:
        xs = {inputs: torch.randn(rows, inputs).bfloat16() for _, inputs in _LAYER_SHAPES}
        taken: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(repetitions):
            for name, layers in made.items():
                started = time.perf_counter()
                for inputs, multiply in layers:
                    multiply(xs[inputs])
                taken[name].append(time.perf_counter() - started)
        products[str(rows)] = {name: 1000 * statistics.median(each) for name, each in taken.items()}
    return products


def _on_cpu(arguments: argparse.Namespace) -> None:
    device = open_device("cpu")
    source = fetch(arguments.model)
    startup.prepare(device.name)
    text = Tokenizer.from_file(str(source / "tokenizer.json")).encode(TEXT.read_text()).ids[: _MAX_LEN - 1]
    with tempfile.TemporaryDirectory() as scratch:
        folders = _folders(source, Path(scratch), calibrate=not arguments.quick)
        harnesses = {name: _harness(folder, device) for name, folder in folders.items()}
    perplexities = {name: perplexity(harness, text) for name, harness in harnesses.items()}
    steps = {bucket: _steps(harnesses, bucket, 10 if arguments.quick else 60) for bucket in BUCKETS}
    products = _products(device, 8 if arguments.quick else 30)
    print(f"{arguments.model}, {device.product_name()}; medians, ms; perplexity of {len(text)} tokens")
    print(f"{'':<17}" + "".join(f"{f'decode {bucket}':>12}" for bucket in BUCKETS) + f"{'perplexity':>12}")
    for name in harnesses:
        print(
            f"{name:<17}"
            + "".join(f"{steps[bucket][name]:>12.2f}" for bucket in BUCKETS)
            + f"{perplexities[name]:>12.3f}"
        )
    quantized = [name for name in harnesses if name != PLAIN]
    ratios = {
        f"{PLAIN}_over_{name}_decode_{bucket}": steps[bucket][PLAIN] / steps[bucket][name]
        for bucket in BUCKETS
        for name in quantized
    } | {f"perplexity_{name}_over_{PLAIN}": perplexities[name] / perplexities[PLAIN] for name in quantized}
    for rows, times in products.items():
        ratios[f"vllm_over_ours_products_{rows}"] = times["vllm"] / times["ours"]
        print(f"products of {rows} rows: ours {times['ours']:.2f} ms, vLLM's {times['vllm']:.2f} ms")
    figures = {
        "model": arguments.model,
        "products_ms": products,
        "device": device.product_name(),
        "steps_ms": steps,
        "perplexity": perplexities,
    }
    report("quantized", figures, ratios)


def _on_gpu(arguments: argparse.Namespace) -> None:
    from tests.bench.gpu.decode import in_process
    from tests.bench.support.gpu_model import CONFIG, model_folder

    configs: dict[str, dict[str, Any]] = {PLAIN: dict(CONFIG)}
    for name, scheme in SCHEMES.items():
        groups = {"0": quantization_group(scheme, ["Linear"]), "1": quantization_group(HEAD, ["lm_head"])}
        configs[name] = CONFIG | {
            "tie_word_embeddings": False, "quantization_config": quantization_config(groups, [])
        }  # fmt: skip
    steps: dict[str, dict[str, float]] = {}
    for name, config in configs.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = model_folder(Path(scratch), config)
            # What a model leaves behind in a process slows the next one's steps down.
            with multiprocessing.get_context("spawn").Pool(1) as process:
                steps[name] = process.apply(
                    in_process, (folder, BUCKETS, (_GPU_CONTEXT,), 40 if arguments.quick else 200)
                )
    print(f"Llama 3.2 1B's shape, {torch.cuda.get_device_name()}; medians, ms")
    ratios: dict[str, float] = {}
    for bucket in BUCKETS:
        at = f"b{bucket}_c{_GPU_CONTEXT}"
        print(f"decode {bucket}: " + ", ".join(f"{name} {times[at]:.3f}" for name, times in steps.items()))
        ratios |= {
            f"{PLAIN}_over_{name}_decode_{bucket}": steps[PLAIN][at] / steps[name][at] for name in SCHEMES
        }
    report("quantized", {"gpu": torch.cuda.get_device_name(), "steps_ms": steps}, ratios)


def main() -> int:
    """Prints a table and the line of JSON; returns the exit code."""
    options = parser(__doc__, "fewer steps, no calibration")
    options.add_argument("--model", choices=("smollm2", "gemma3-270m"), default="smollm2")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = options.parse_args()
    bench = _on_gpu if arguments.device == "cuda" else _on_cpu
    return exit_code("quantized", lambda: bench(arguments))


if __name__ == "__main__":
    sys.exit(main())
