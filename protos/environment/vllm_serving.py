"""vLLM's variables about serving: the API server, the engine's processes, caches, logs, requests."""

from typing import Final

from protos.environment.variable import Kind, Variable, honoured, mapped, moot

ROWS: Final[list[Variable]] = [
    # What our settings take.
    *mapped("--compile-cache-root", "VLLM_CACHE_ROOT", reason="compiled code lies in a folder for each device"),
    *mapped("--no-compile-cache", "VLLM_DISABLE_COMPILE_CACHE"),
    *mapped("--batchsize-log-interval-s", "VLLM_LOG_BATCHSIZE_INTERVAL"),
    *mapped("--log-level", "VLLM_LOGGING_LEVEL", reason="critical and fatal count as error, notset as debug"),
    *mapped("--api-key", "VLLM_API_KEY"),
    *mapped("--keep-alive-s", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"),
    *mapped("--dev-mode", "VLLM_SERVER_DEV_MODE", reason="/server_info, /tokenizer_info and /reset_prefix_cache"),
    *mapped("--max-prompts", "VLLM_MAX_COMPLETION_PROMPTS"),
    *mapped("--grammar-cache-mib", "VLLM_XGRAMMAR_CACHE_MB"),
    # What would load another model, or answer otherwise.
    Variable(
        "VLLM_USE_MODELSCOPE", Kind.MOOT, "models come from the Hugging Face hub or a folder; download the model and"
        " pass its folder, or unset it", refused="on",
    ),
    Variable(
        "VLLM_MODEL_REDIRECT_PATH", Kind.REFUSED, "models are not redirected; pass the folder that the file names"
        " as the model, or unset it",
    ),
    Variable(
        "VLLM_BATCH_INVARIANT", Kind.MOOT, "an answer may differ in its last bits with its neighbours in a batch;"
        " unset it, and see docs/sampling.md for what makes samples reproducible", refused="on",
    ),
    # What holds anyway.
    *honoured("the KV cache of workers on a CPU, GiB, unless --kv-memory is set; no effect on other devices",
              "VLLM_CPU_KVCACHE_SPACE"),
    *honoured("no usage data is ever reported", "VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK"),
    *honoured(
        "vLLM's model code reads it in the worker",
        "VLLM_MLA_DISABLE VLLM_TRITON_FORCE_FIRST_CONFIG VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_CUDA_COMPATIBILITY_PATH",
    ),
    # What has another place here.
    *moot(
        "the worker loads its own platform (triptych) and no plugin of vLLM; --device chooses the device",
        "VLLM_PLUGINS",
    ),
    *moot(
        "refused with --pipeline-parallel-size above 1, whose stages get layers evenly; otherwise without effect",
        "VLLM_PP_LAYER_PARTITION",
    ),
    *moot("--host and --port are the HTTP address, and ranks meet at --master", "VLLM_HOST_IP VLLM_PORT VLLM_LOOPBACK_IP"),
    *moot("--admin-api-key lets clients load and unload adapters", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
    *moot("name adapters with --lora-modules, or load them by their path",
          "VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST"),
    *moot("--step-timeout-s bounds a step", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"),
    *moot("--drain-timeout-s and --drain-s bound a shutdown", "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"),
    *moot("the gateway listens at once, and its /health says when the model is ready", "VLLM_ENGINE_READY_TIMEOUT_S"),
    *moot("a gateway always outlives its workers", "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH"),
    *moot("--grammar-time-s bounds the compilation of every grammar", "VLLM_REGEX_COMPILATION_TIMEOUT_S"),
    *moot("our parsers of tool calls read without regular expressions that can run away",
          "VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS"),
    *moot("the request's own fields say how far a tool call is held to its schema",
          "VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY"),
    *moot("docs/api-http.md has the fixed limits of a request",
          "VLLM_MAX_N_SEQUENCES VLLM_MAX_STOP_STRINGS VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS"),
    *moot("requests name the model; give clients' names with --served-model-name", "VLLM_SKIP_MODEL_NAME_VALIDATION"),
    *moot("--max-model-len says how long sequences may be", "VLLM_ALLOW_LONG_MAX_MODEL_LEN"),
    *moot("chat templates have limits of their own", "VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT"),
    *moot("a gateway keeps no state, so no response is stored", "VLLM_ENABLE_RESPONSES_API_STORE"),
    *moot("Cohere's chat API is not served; /v2/embed and /v2/rerank always are", "VLLM_ENABLE_COHERE_API"),
    *moot("tools run at the client, and chat templates come from the model",
          "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS"
          " VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_SYSTEM_START_DATE"),
    *moot("--cpu-threads says how many threads kernels use; bind processes with taskset or cpusets",
          "VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU"),
    *moot("/metrics has the figures", "VLLM_LOG_STATS_INTERVAL VLLM_DEBUG_MFU_METRICS"),
    *moot("answers are not logged", "VLLM_DEBUG_LOG_API_SERVER_RESPONSE"),
    *moot("no usage data is ever reported", "VLLM_USAGE_STATS_SERVER VLLM_USAGE_SOURCE"),
    *moot("--log-level and --log-format are the settings of logs, which go to standard error",
          "VLLM_CONFIGURE_LOGGING VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_STREAM VLLM_LOGGING_PREFIX"
          " VLLM_LOGGING_COLOR VLLM_DISABLE_LOG_LOGO VLLM_TRACE_FUNCTION VLLM_LOG_MODEL_INSPECTION"),
    *moot("text is all that is served; no image, video or audio is fetched",
          "VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT"
          " VLLM_AUDIO_FETCH_TIMEOUT VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS"
          " VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MEDIA_URL_ALLOW_REDIRECTS"
          " VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_MAX_AUDIO_DECODE_DURATION_S"
          " VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_EMBED_DECODE_BYTES VLLM_MAX_AUDIO_PREPROCESS_WORKERS"
          " VLLM_MAX_IMAGE_PIXELS VLLM_VIDEO_LOADER_BACKEND VLLM_MEDIA_CONNECTOR VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME"),
    *moot("the services are processes that speak gRPC, and nothing is pickled",
          "VLLM_ENABLE_V1_MULTIPROCESSING VLLM_WORKER_MULTIPROC_METHOD VLLM_RPC_BASE_PATH"
          " VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_MSGPACK_ZERO_COPY_THRESHOLD"
          " VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_PROCESS_NAME_PREFIX"
          " VLLM_USE_SPINLOOP_EXT VLLM_USE_V2_MODEL_RUNNER VLLM_GC_DEBUG VLLM_USE_RUST_FRONTEND VLLM_USE_RUST_BENCH"
          " VLLM_RUST_FRONTEND_PATH VLLM_USE_FASTOKENS VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_NVTX_SCOPES_FOR_PROFILING"),
    *moot("a request's id is the client's, or random", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"),
    *moot("KV events are gRPC messages, whose hashes are bytes", "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"),
    *moot("more replicas are more workers: --workers, or one more `triptych worker`; there is no Ray",
          "VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT"
          " VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_ELASTIC_EP_SCALE_UP_LAUNCH VLLM_ELASTIC_EP_DRAIN_REQUESTS"
          " VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM VLLM_USE_RAY_WRAPPED_PP_COMM"
          " VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_RAY_PER_WORKER_GPUS VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY"
          " VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"),
    *moot("KV memory is neither moved between hosts nor to the host's memory",
          "VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT"
          " VLLM_P2P_MAX_PEERS VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S VLLM_EC_SIDE_CHANNEL_HOST"
          " VLLM_EC_SIDE_CHANNEL_PORT VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_MOONCAKE_BOOTSTRAP_PORT"
          " VLLM_MOONCAKE_STORE_TIER_LOG VLLM_MOONCAKE_LOAD_RECV_THREADS VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO"
          " VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT VLLM_USE_SIMPLE_KV_OFFLOAD VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS"
          " VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY VLLM_WEIGHT_OFFLOADING_DISABLE_UVA VLLM_WSL2_ENABLE_PIN_MEMORY"),
    *moot("it belongs to the installation of vLLM or to its image",
          "VLLM_TARGET_DEVICE VLLM_MAIN_CUDA_VERSION VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST"
          " VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_DOCKER_BUILD_CONTEXT VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE"
          " VLLM_BUILD_URL VLLM_IMAGE_TAG VLLM_SKIP_VERSION_SUFFIX VLLM_CONFIG_ROOT VLLM_CPU_CI_ENV"),
    *moot("--load-format names the format of the weights", "VLLM_TEST_FORCE_LOAD_FORMAT VLLM_FASTSAFETENSORS_QUEUE_SIZE"),
]  # fmt: skip
"""All rows."""

OLDER: Final[list[Variable]] = [
    *moot("vLLM 0.32 has no such variable any more, and there is one engine here", "VLLM_USE_V1"),
    *moot("attention runs in the worker's own kernels, on every device",
          "VLLM_ATTENTION_BACKEND VLLM_FLASH_ATTN_VERSION VLLM_CPU_SGL_KERNEL VLLM_CPU_MOE_PREPACK"),
    *moot("there is no profiler here", "VLLM_TORCH_PROFILER_DIR"),
]  # fmt: skip
"""Variables of earlier releases that unit files still set."""
