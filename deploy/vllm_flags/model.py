"""The flags about vLLM's model, its files and its kernels."""

from deploy.vllm_flags import conversions
from deploy.vllm_flags.flag import mapped, moot, refused, same

TOKENIZER = "--tokenizer"
"""The flag that may name the model again."""
_KERNELS = "each device has its own kernels"
_SLEEP = "is not served; stop the worker to free its memory"
_MAMBA = "no state-space model is served"

MODEL = [
    *same("--model", note="the model may also be the first argument"),
    *same("--revision", "--seed"),
    *same("--trust-remote-code", form="switch"),
    *same("--served-model-name", form="values"),
    *same("--max-logprobs", "--generation-config", "--override-generation-config"),
    *mapped(
        "--max-model-len",
        "--max-model-len",
        "is a number; auto and -1 are the model's whole context, which vLLM shortens to what fits",
        convert=conversions.context_length,
    ),
    *mapped(
        "--dtype",
        "--dtype",
        "writes half as float16 and float as float32",
        convert=conversions.choice("--dtype", {"half": "float16", "float": "float32"}),
    ),
    *mapped(
        "--enforce-eager",
        "--backend",
        "is --backend eager, which is for debugging",
        form="switch",
        convert=conversions.switch("--backend=eager"),
    ),
    *mapped(
        "--runner",
        "--pooling-task",
        "follows the model: a pooling model pools, every other model generates",
        convert=conversions.runner,
    ),
    *mapped(
        "--convert",
        "--pooling-task",
        "is the pooling task embed or classify",
        convert=conversions.convert,
    ),
    *mapped(
        "--load-format",
        "--load-format",
        "reads weights once, in order; hf is auto, and the other loaders are safetensors",
        convert=conversions.choice(
            "--load-format",
            {"hf": "auto"}
            | dict.fromkeys(("fastsafetensors", "runai_streamer", "instanttensor"), "safetensors"),
        ),
    ),
    *moot(
        "the checkpoint's config.json names its method",
        "--allow-deprecated-quantization",
        form="switch",
    ),
    *refused(
        "is read from the checkpoint's config.json; omit it for a quantized checkpoint, or make one with"
        " `triptych quantize`",
        "--quantization -q",
        "--quantization-config",
        harmless=("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "gguf", "auto"),
    ),
    *refused("is read from the model's folder; put the tokenizer's files there", TOKENIZER),
    *refused(
        "is the model's; give --revision of a commit that has the tokenizer's files",
        "--tokenizer-revision",
        "--code-revision",
    ),
    *moot("the tokenizer's files say what it is", "--tokenizer-mode"),
    *refused(
        "is read from the model's folder; edit a copy of it",
        "--hf-config-path",
        "--config-format",
        harmless=("auto",),
    ),
    *refused(
        "is not supported; edit config.json in a copy of the model's folder",
        "--hf-overrides",
        "--model-class-overrides",
        harmless=("{}",),
    ),
    *refused(
        "is not supported; see --pooling-task and the request's parameters",
        "--pooler-config",
        harmless=("{}",),
    ),
    *refused(
        "would load code into the worker; use logit_bias, bad_words or structured_outputs in the request",
        "--logits-processors",
        form="values",
    ),
    *refused("would load code into the worker; preprocess in the client", "--io-processor-plugin"),
    *refused(
        "is not served; log-probabilities are those of the raw logits",
        "--logprobs-mode",
        harmless=("raw_logprobs",),
    ),
    *refused("is not served; send text or token ids", "--enable-prompt-embeds", form="switch"),
    *refused(
        "is not served; clients with tokens call the scheduler's gRPC API (--scheduler-port)",
        "--skip-tokenizer-init",
        form="switch",
    ),
    *refused(
        "is not served; omit it", "--enable-return-routed-experts", "--return-sampling-mask", form="switch"
    ),
    *refused("is not served; send text alone", "--allowed-local-media-path", harmless=("",)),
    *refused("is not served; send text alone", "--allowed-media-domains", form="values"),
    *refused(
        "would change the model; shorten --max-model-len to the window instead",
        "--disable-sliding-window",
        form="switch",
    ),
    *refused(_SLEEP, "--enable-sleep-mode", "--sleep-mode-offload-cudagraph", form="switch"),
    *refused(_SLEEP, "--sleep-preserve-parameter-names", form="values"),
    *refused("is read from the environment; set HF_TOKEN, which others do not see", "--hf-token"),
    *refused("is read from the environment; set HF_HOME", "--download-dir"),
    *refused("is not supported; vLLM's own model code runs", "--model-impl", harmless=("auto", "vllm")),
    *refused("has no loader here; see --load-format", "--model-loader-extra-config", harmless=("{}",)),
    *moot("vLLM has removed it, too", "--disable-cascade-attn", form="switch"),
    *moot("seeds give the same tokens on every device", "--use-fp64-gumbel", form="switch"),
    *moot("nothing is replayed", "--enable-trace-replay", form="switch"),
    *moot("the worker allocates its memory once", "--enable-cumem-allocator", form="switch"),
    *moot("the worker allocates its memory once", "--enable-nccl-comm-suspend", form="switch"),
    *moot("the gateway has two threads for long texts; add --gateways", "--renderer-num-workers"),
    *moot(
        "weights are read once, in order",
        "--safetensors-load-strategy",
        "--safetensors-prefetch-num-threads",
        "--safetensors-prefetch-block-size",
        "--pt-load-map-location",
    ),
    *moot("only the checkpoint's weight files are read", "--ignore-patterns", form="values"),
    *moot("progress is in the log", "--use-tqdm-on-load", form="switch"),
    *moot(
        _KERNELS,
        "--attention-backend",
        "--moe-backend",
        "--linear-backend",
        "--sparse-indexer-topk-backend",
        "--ir-op-priority",
        "--attention-config -ac",
        "--kernel-config",
    ),
    *moot(_KERNELS, "--enable-flashinfer-autotune", form="switch"),
    *moot(
        _MAMBA,
        "--mamba-backend",
        "--mamba-ssu-algorithm",
        "--mamba-cache-philox-rounds",
        "--gdn-prefill-backend",
        "--kda-prefill-backend",
        "--kda-decode-backend",
        "--mamba-cache-dtype",
        "--mamba-ssm-cache-dtype",
        "--mamba-block-size",
        "--mamba-cache-mode",
        "--replayssm-buffer-len",
    ),
    *moot(
        _MAMBA,
        "--enable-mamba-cache-stochastic-rounding",
        "--enable-mamba-shared-prefix-checkpoint",
        "--use-replayssm",
        form="switch",
    ),
]

MULTI_MODAL = [
    *same("--language-model-only", form="switch"),
    *moot(
        "models read text alone",
        "--limit-mm-per-prompt",
        "--media-io-kwargs",
        "--mm-processor-kwargs",
        "--mm-processor-cache-gb",
        "--mm-processor-cache-type",
        "--mm-hasher-algorithm",
        "--mm-shm-cache-max-object-size-mb",
        "--mm-encoder-tp-mode",
        "--mm-encoder-attn-backend",
        "--mm-encoder-attn-dtype",
        "--mm-encoder-fp8-scale-path",
        "--mm-encoder-fp8-scale-save-path",
        "--mm-encoder-fp8-scale-save-margin",
        "--video-pruning-rate",
        "--video-pruning-method",
        "--mm-tensor-ipc",
        "--mm-processor-device",
        "--mm-ipc-gpu-memory-gb",
        "--ec-manager-config",
        "--default-mm-loras",
    ),
    *moot(
        "models read text alone",
        "--interleave-mm-strings",
        "--skip-mm-profiling",
        "--mm-device-do-normalize",
        "--disable-chunked-mm-input",
        "--enable-tower-connector-lora",
        form="switch",
    ),
    *refused("is not served; send text alone", "--enable-mm-embeds", "--mm-encoder-only", form="switch"),
]

LORA = [
    *same("--enable-lora", form="switch"),
    *same("--max-loras", "--max-lora-rank", "--lora-dtype", "--max-cpu-loras"),
    *moot(
        "adapters may target every layer that they have weights for", "--lora-target-modules", form="values"
    ),
    *moot(
        "adapters run as --max-loras says",
        "--fully-sharded-loras",
        "--specialize-active-lora",
        "--enable-mixed-moe-lora-format",
        "--enable-moe-shared-loras",
        form="switch",
    ),
    *moot("adapters of classifiers follow the model's labels", "--max-lora-cls-labels"),
]
