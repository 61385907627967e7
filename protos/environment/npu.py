"""The variables of vLLM-RBLN (0.11 and 0.12), of its runtime, and of vLLM-Spyre (today sendnn-inference)."""

from typing import Final

from protos.environment.variable import Kind, Variable, honoured, mapped, moot

_BUCKET: Final = "VLLM_RBLN_DECODE_BATCH_BUCKET"

RBLN: Final[list[Variable]] = [
    Variable(
        "VLLM_RBLN_USE_VLLM_MODEL", Kind.HONOURED, "1 is the only path: graphs are made by torch.compile from"
        " vLLM's models; set 1 or unset it, and pass the model's own folder instead of one that optimum-rbln compiled",
        refused="off",
    ),
    *mapped("--decode-bucket-strategy", f"{_BUCKET}_STRATEGY"),
    *mapped("--decode-bucket-min", f"{_BUCKET}_MIN"),
    *mapped("--decode-bucket-step", f"{_BUCKET}_STEP"),
    *mapped("--decode-bucket-limit", f"{_BUCKET}_LIMIT", reason="unset, it is 16 here and 1 in vLLM-RBLN"),
    *mapped("--decode-buckets", f"{_BUCKET}_MANUAL_BUCKETS"),
    *mapped("--compile-strict", "VLLM_RBLN_COMPILE_STRICT_MODE", reason="unset, it is off here and on in vLLM-RBLN 0.12"),
    *mapped("--compile-only", "VLLM_RBLN_COMPILE_ONLY"),
    *mapped("--enable-warm-up", "VLLM_RBLN_ENABLE_WARM_UP"),
    *mapped("--language-model-only", "VLLM_RBLN_DISABLE_MM", reason="the text model of a multimodal checkpoint"),
    *mapped("--sub-block-cache", "VLLM_RBLN_SUB_BLOCK_CACHE"),
    *mapped("--rbln-use-device-tensor", "VLLM_RBLN_USE_DEVICE_TENSOR"),
    *mapped("--rbln-num-devices-per-local-rank", "VLLM_RBLN_NUM_DEVICES_PER_LOCAL_RANK", "VLLM_RBLN_TP_SIZE"),
    *mapped("--rbln-use-custom-kernel", "RBLN_USE_CUSTOM_KERNEL", "VLLM_RBLN_USE_CUSTOM_KERNEL",
            reason="two names of one switch"),
    *mapped("--rbln-moe-use-opt-kernel", "VLLM_RBLN_MOE_USE_OPT_KERNEL"),
    *mapped("--rbln-moe-custom-kernel", "VLLM_RBLN_MOE_CUSTOM_KERNEL"),
    *honoured("two names of one switch of the NPU's runtime; a replica of several ranks refuses it",
              "RBLN_PROFILER VLLM_RBLN_PROFILER"),
    *honoured("the NPUs that a process may use, which `triptych up` shares out", "RBLN_DEVICES RBLN_VISIBLE_DEVICES"),
    *honoured("the device file in deploy/compose.rbln.yaml", "RBLN_DEVICE"),
    *honoured("the NPU for which --compile-only compiles", "RBLN_TARGET_SOC RBLN_FORCE_NPU_NAME"),
    *honoured("the NPU's runtime or compiler reads it in the worker",
              "RBLN_NUM_THREADS RBLN_PROFILER_ACTIVITY RBLN_RUNTIME_FORCE_SYNC RBLN_CTX_STANDALONE RBLN_DUMMY_DEVICE"),
    *honoured("the NPU's compiler reads it; RBLN_USE_CUSTOM_KERNEL says which operators attention calls", "RBLN_KERNEL_MODE"),
    Variable(
        "VLLM_RBLN_NUM_HIDDEN_LAYERS", Kind.MOOT, "a model is served with all of its layers; set 0 or unset it",
        refused="on",
    ),
    Variable("VLLM_RBLN_ENFORCE_MODEL_FP32", Kind.MOOT, "use --dtype float32, and unset it", refused="on"),
    Variable("VLLM_RBLN_COMPILE_MODEL", Kind.MOOT, "use --backend eager, and unset it", refused="off"),
    *moot("the worker sets it from --rbln-num-devices-per-local-rank", "RBLN_NPUS_PER_DEVICE"),
    *moot("the worker sets it from the checkpoint's weights", "RBLN_QUANT_BITS"),
    *moot("a hit ends at a prefill chunk: --max-num-batched-tokens is the size", "VLLM_RBLN_SUB_BLOCK_SIZE"),
    *(
        Variable(name, Kind.MOOT, "activations keep 16 or 32 bits; unset it, and see docs/quantization.md", refused="on")
        for name in ("VLLM_RBLN_USE_W8A8", "VLLM_RBLN_USE_W8A8_FP8")
    ),
    *moot("the checkpoint says how many bits its weights have", "VLLM_RBLN_USE_W8A16"),
    *moot("the worker chooses the kernel by block size and model",
          "RBLN_FLASH_CAUSAL_ATTN VLLM_RBLN_FLASH_CAUSAL_ATTN VLLM_RBLN_BATCH_ATTN_OPT VLLM_RBLN_SORT_BATCH"),
    *moot("sampling always runs on the device", "VLLM_RBLN_SAMPLER"),
    *moot("/metrics has the figures", "VLLM_RBLN_METRICS VLLM_RBLN_METRICS_FILE VLLM_RBLN_METRICS_DIR"),
    *moot("bind processes with taskset or numactl", "VLLM_RBLN_NUMA"),
    *moot("--num-blocks and --kv-memory size the KV cache, which does not grow", "VLLM_RBLN_USE_DYNAMIC_KV_CACHE"),
    *moot("expert layers gather and reduce their tokens in one static graph",
          "VLLM_RBLN_SPECIALIZE_MOE_DECODE VLLM_RBLN_USE_MOE_TOKENS_MASK VLLM_RBLN_DISPATCH_ALL2ALL"
          " VLLM_RBLN_COMBINE_ALL2ALL VLLM_RBLN_MOE_REDUCE_SCATTER"),
    *moot("replicas exchange nothing: a step of one never waits for another",
          "VLLM_RBLN_DP_IMPL VLLM_RBLN_DP_INPUT_ALL_GATHER VLLM_RBLN_LOGITS_ALL_GATHER"),
    *moot("the host keeps no weights on a disk, and a worker that fails ends",
          "VLLM_RBLN_DISABLE_OFFLOAD VLLM_RBLN_DISABLE_WORKER_FAIL_FAST"),
    *moot("ranks meet at --master, which `triptych up` chooses; there is no Ray",
          "VLLM_RBLN_AUTO_PORT VLLM_RBLN_NUM_RAY_NODES"),
    *moot("KV memory is not moved between hosts", "VLLM_RBLN_NIXL_SWA_VIEW_OPT"),
]  # fmt: skip
"""vLLM-RBLN's rows."""

# The plugin renamed all of its variables when it became sendnn-inference.
_PREFIXES: Final = ("VLLM_SPYRE_", "SENDNN_INFERENCE_")

_MAPPED: Final = {
    "DYNAMO_BACKEND": ("--backend", "sendnn, sendnn_decoder and inductor are compiled"),
    "WARMUP_BATCH_SIZES": ("--pool-batch-sizes", "static shapes of pooling models"),
    "WARMUP_PROMPT_LENS": ("--pool-prompt-lens", "static shapes of pooling models"),
    "REQUIRE_PRECOMPILED_DECODERS": ("--require-precompiled", ""),
}

_MOOT: Final = {
    "WARMUP_NEW_TOKENS": "graphs do not depend on how many tokens are generated",
    "USE_CB": "batching is always continuous",
    "USE_CHUNKED_PREFILL": "prompts are always prefilled in chunks",
    "CP_INTERLEAVE_STEPS": "--decode-steps-per-chunk says how prefill and decode take turns",
    "ENABLE_PROMPT_LOGPROBS": "requests may always ask for prompt_logprobs",
    "PERF_METRIC_LOGGING_ENABLED": "/metrics has the figures",
    "PERF_METRIC_LOGGING_DIR": "/metrics has the figures",
    "OVERRIDE_SIGNALS_HANDLER": "SIGTERM always drains",
    "UPDATE_THREAD_CONFIG": "--cpu-threads says how many threads kernels use",
    "NUM_CPUS": "--cpu-threads says how many threads kernels use",
    "MAX_LOAD_PROCESSES": "every worker loads its model at once",
    "WORKER_LOG_REDIRECT_DIR": "`triptych up` writes each worker's log to --run-dir",
    "GLOO_TIMEOUT_MINUTES": "ranks that do not meet end, and their supervisor starts them again",
    "SIMPLE_COMPILE_BACKEND": "sampling runs in the worker's own kernels",
    "REQUIRE_KNOWN_CONFIG": "--require-precompiled refuses what is not compiled",
    "MODEL_CONFIG_FILE": "settings are flags and variables (docs/configuration.md)",
}

_ONLY_NEW: Final = (
    "SENDNN_INFERENCE_ASYNC_MM_ENCODER SENDNN_INFERENCE_CPU_MM_DTYPE SENDNN_INFERENCE_MM_DEVICE"
    " SENDNN_INFERENCE_TP_MM_SHARING"
)

SPYRE: Final[list[Variable]] = [
    *(
        row
        for name, (flag, reason) in _MAPPED.items()
        for row in mapped(flag, *(prefix + name for prefix in _PREFIXES), reason=reason)
    ),
    *mapped("--compile-cache", "TORCH_SENDNN_CACHE_ENABLE"),
    *mapped("--compile-cache-dir", "TORCH_SENDNN_CACHE_DIR"),
    *(row for name, reason in _MOOT.items() for prefix in _PREFIXES for row in moot(reason, prefix + name)),
    *moot("text is all that is served", _ONLY_NEW),
    *moot("--decode-steps-per-chunk and --order say which request runs next",
          "SENDNN_INFERENCE_LONG_OUT_PRIO SENDNN_INFERENCE_PAUSING_ENABLED"),
    *moot("/metrics has the figures", "SENDNN_INFERENCE_BENCH_METRICS_ENABLED"),
    *moot("the plugin sets it for Spyre's compiler",
          "VLLM_DT_CHUNK_LEN VLLM_DT_MAX_BATCH_SIZE VLLM_DT_MAX_BATCH_TKV_LIMIT VLLM_DT_MAX_CONTEXT_LEN"),
]  # fmt: skip
"""vLLM-Spyre's rows."""
