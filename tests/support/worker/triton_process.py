"""Compiles the Triton kernels for a GPU, which need not be present.

The interpreter accepts code that the compiler refuses.

`python -m tests.support.worker.triton_process` prints one line of JSON: each kernel's shared memory in
bytes.
"""

import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from worker_svc.devices.attention import AttentionParams
from worker_svc.devices.cuda import lora_stack, triton_attention, triton_quantized

HOPPER = GPUTarget("cuda", 90, 32)
PROCESSORS = 132
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
STRIDES = ("_token", "_head", "_block", "_half")


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int) -> Any:
    """Compiles a kernel for Hopper.

    Pointers and strides are multiples of 16; arguments without a type are strides.
    """
    signature, given, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], given[place,] = "constexpr", constants[name]
            continue
        signature[name] = types.get(name, "i32")
        if signature[name].startswith("*") or name.endswith(STRIDES):
            attributes[place,] = [["tt.divisibility", 16]]
    return triton.compile(ASTSource(kernel, signature, given, attributes), target=HOPPER, options=options)


def attention(
    params: AttentionParams, dtype: torch.dtype, block_size: int, rows: int, query_len: int
) -> tuple[Any, triton_attention._Launch]:
    """Compiles the attention kernel for a step over up to 4,096 tokens."""
    launch = triton_attention._launch(
        params, rows, query_len, block_size, 4096 // block_size, dtype.itemsize, PROCESSORS
    )
    states, sums = TYPES[dtype], "*fp32" if launch.splits > 1 else TYPES[dtype]
    types = dict.fromkeys(("query", "key", "value", "cache", "output"), states)
    types |= dict.fromkeys(("partial", "maxima", "sums"), sums)
    types |= dict.fromkeys(("seq_lens", "query_start", "table"), "*i32")
    types |= {"slots": "*i64", "sinks": "*fp32", "scale": "fp32", "softcap": "fp32"}
    constants: dict[str, Any] = {
        "HEADS": params.num_heads, "GROUP": params.num_heads // params.num_kv_heads, "HEAD_SIZE": params.head_size,
        "BLOCK_SIZE": block_size, "QUERY_LEN": query_len, "WINDOW": params.window, "SOFTCAP": params.softcap > 0,
        "SINKS": params.sinks, "WRITES": query_len == 1, "QUERIES": launch.queries, "M": launch.tile_rows,
        "N": launch.keys, "D": launch.head_elements, "SPLITS": launch.splits,
    }  # fmt: skip
    if not params.sinks:
        constants["sinks"] = None
    if query_len > 1:
        constants |= {"key": None, "value": None}
    options = {"num_warps": launch.warps, "num_stages": triton_attention.STAGES}
    return compiled(triton_attention.attend_kernel, types, constants, **options), launch


def quantized() -> dict[str, Any]:
    """Compiles the kernels of quantized weights, with groups of 64 and per channel."""
    made = {}
    inputs = 8192  # the loops run several times
    for bits, group in ((4, 64), (8, 0)):
        pointers = dict.fromkeys(("x", "scales", "out"), "*bf16")
        common: dict[str, Any] = {"INPUTS": inputs, "LANES": 32, "BITS": bits, "GROUP": group}
        tiles = inputs // (32 * 16 // bits)
        product = common | {"BIAS": False, "bias": None, "EARLY": True, "ASSEMBLY": True}
        outputs, wide, warps = triton_quantized.one_row_launch(16 * tiles)
        constants = product | {"WORDS": 16 * tiles, "N": outputs, "W": wide}
        made[f"one row, {bits} bits"] = compiled(
            triton_quantized.one_row_kernel, pointers | {"words": "*i32"}, constants, num_warps=warps
        )
        outputs, splits, warps = triton_quantized.many_rows_launch(32, inputs, inputs)
        constants = product | {"TILES": tiles, "M": 32, "N": outputs, "SPLITS": splits}
        made[f"many rows, {bits} bits"] = compiled(
            triton_quantized.many_rows_kernel, pointers | {"lanes": "*i16"}, constants,
            num_warps=warps, num_stages=triton_quantized.STAGES,
        )  # fmt: skip
        constants = common | {"TILES": tiles, "N": 16, "W": 128}
        made[f"dequantize, {bits} bits"] = compiled(
            triton_quantized.dequantize_kernel, pointers | {"lanes": "*i16"}, constants
        )
    return made


def main() -> None:
    """Compiles all kernels and prints their shared memory."""
    llama = AttentionParams(32, 8, 64, 0.125, 0, 0.0, writes=True)
    gemma = AttentionParams(8, 4, 256, 0.06, 512, 50.0, writes=True)
    gpt_oss = AttentionParams(64, 8, 64, 0.125, 128, 0.0, writes=True, sinks=True)
    odd = AttentionParams(9, 3, 80, 0.1, 0, 0.0, writes=True)
    steps: dict[str, tuple[AttentionParams, torch.dtype, int, int, int]] = {
        "decode, split": (llama, torch.bfloat16, 128, 1, 1),
        "decode, whole": (llama, torch.bfloat16, 128, 128, 1),
        "decode, sinks, small blocks": (gpt_oss, torch.bfloat16, 16, 8, 1),
        "chunk": (llama, torch.bfloat16, 128, 1, 512),
        "chunk, window, soft cap": (gemma, torch.bfloat16, 128, 1, 512),
        "chunk, float32, odd sizes": (odd, torch.float32, 48, 1, 128),
    }
    kernels = {}
    for name, step in steps.items():
        kernels[name], launch = attention(*step)
        if name == "decode, split":
            constants = {"HEAD_SIZE": 64, "D": 64, "SPLITS": launch.splits, "PARTS": launch.splits}
            types = dict.fromkeys(("partial", "maxima", "sums"), "*fp32") | {"output": "*bf16"}
            kernels["combine"] = compiled(triton_attention.combine_kernel, types, constants)
    types = dict.fromkeys(("base", "inner", "b", "bias", "out"), "*bf16") | {"slots": "*i32"}
    constants = {"END0": 2048, "END1": 2560, "END2": 3072, "END3": 3072}
    constants |= {"COLUMNS": 64, "RANK": 16, "HAS_BIAS": True, "ROWS": 16, "N": 64, "K": 64}
    kernels["adapters"] = compiled(lora_stack.expand_kernel, types, constants)
    types = dict.fromkeys(("key", "value", "cache"), "*bf16") | {"slots": "*i64"}
    constants = {"HEAD_SIZE": 64, "KV_HEADS": 8, "BLOCK_SIZE": 128, "ELEMENTS": 512}
    kernels["write"] = compiled(triton_attention.write_kernel, types, constants)
    kernels |= quantized()
    print(json.dumps({name: kernel.metadata.shared for name, kernel in kernels.items()}))


if __name__ == "__main__":
    main()
