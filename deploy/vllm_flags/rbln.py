"""The flags that vLLM-RBLN 0.12 adds to `vllm serve`."""

from typing import Final

from deploy.vllm_flags import conversions
from deploy.vllm_flags.flag import VllmFlag, mapped, moot, refused, same

_EXPERTS = "expert layers gather and reduce their tokens in one static graph"

RBLN: Final[tuple[VllmFlag, ...]] = (
    *same("--rbln-num-devices-per-local-rank"),
    *same("--rbln-use-custom-kernel", form="switch"),
    VllmFlag("--rbln-enable-sub-block-cache", "alias", "--sub-block-cache", "", "switch"),
    VllmFlag("--rbln-decode-batch-bucket-strategy", "alias", "--decode-bucket-strategy", ""),
    VllmFlag("--rbln-decode-batch-bucket-min", "alias", "--decode-bucket-min", ""),
    VllmFlag("--rbln-decode-batch-bucket-step", "alias", "--decode-bucket-step", ""),
    VllmFlag(
        "--rbln-decode-batch-bucket-limit",
        "alias",
        "--decode-bucket-limit",
        "unset, it is 16 here and 1 in vLLM-RBLN",
    ),
    *refused(
        "is --decode-buckets 1,2,4 here, with commas",
        "--rbln-decode-batch-bucket-manual-buckets",
        form="values",
    ),
    *mapped(
        "--rbln-enforce-model-fp32",
        "--dtype",
        "is --dtype float32",
        form="switch",
        convert=conversions.switch("--dtype=float32"),
    ),
    *moot("a hit ends at a prefill chunk: --max-num-batched-tokens is the size", "--rbln-sub-block-size"),
    *moot("sampling always runs on the device", "--rbln-use-custom-sampler", form="switch"),
    *moot(
        "the worker chooses the kernel by block size and model", "--rbln-use-batch-attn-opt", form="switch"
    ),
    *moot(
        "--num-blocks and --kv-memory size the KV cache, which does not grow",
        "--rbln-use-dynamic-kv-cache",
        form="switch",
    ),
    *moot(
        _EXPERTS,
        "--rbln-specialize-moe-decode",
        "--rbln-use-moe-tokens-mask",
        "--rbln-use-all2all-dispatch",
        "--rbln-use-all2all-combine",
        form="switch",
    ),
    *refused(
        "is not served: activations keep 16 or 32 bits; omit it, see docs/quantization.md",
        "--rbln-use-w8a8",
        form="switch",
    ),
    *refused("follows --dtype; set that one", "--rbln-compile-dtype", harmless=("",)),
    *refused(
        "belongs to optimum-rbln; pass the model's own folder, and omit it",
        "--rbln-optimum-overrides",
        harmless=("{}",),
    ),
)
"""Each flag, once."""
