"""The flags of vLLM's ranks, memory, scheduler, compilation and observability."""

from deploy.vllm_flags import compilation, conversions
from deploy.vllm_flags.flag import mapped, moot, refused, same

_HOSTS = "is not a flag of one machine; start `triptych worker` on each host, see docs/ranks.md"
_CONTEXT = "is not supported; split the model with --tensor-parallel-size or --pipeline-parallel-size"
_REPLICAS = "replicas share one scheduler"
_EXPERTS = "experts stay where --enable-expert-parallel puts them"
_ALL_REDUCE = "each device has its own way to exchange data"

PARALLEL = [
    *same("--tensor-parallel-size -tp", "--pipeline-parallel-size -pp"),
    *same("--enable-expert-parallel -ep", form="switch"),
    *mapped(
        "--data-parallel-size -dp",
        "--workers",
        "counts replicas behind one scheduler",
        convert=conversions.count("--workers"),
    ),
    *mapped(
        "--data-parallel-size-local -dpl",
        "--workers",
        "counts replicas of this machine",
        convert=conversions.count("--workers"),
    ),
    *refused(
        _HOSTS,
        "--master-addr",
        "--master-port",
        "--data-parallel-address -dpa",
        "--data-parallel-rpc-port -dpp",
    ),
    *refused(_HOSTS, "--nnodes -n", harmless=("1",)),
    *refused(
        _HOSTS,
        "--node-rank -r",
        "--data-parallel-rank -dpn",
        "--data-parallel-start-rank -dpr",
        harmless=("0",),
    ),
    *refused(
        _HOSTS,
        "--data-parallel-hybrid-lb -dph",
        "--data-parallel-external-lb -dpe",
        "--data-parallel-multi-port-external-lb -dpm",
        form="switch",
    ),
    *refused("is read from the environment; set CUDA_VISIBLE_DEVICES or RBLN_DEVICES", "--device-ids"),
    *refused(
        _CONTEXT,
        "--decode-context-parallel-size -dcp",
        "--prefill-context-parallel-size -pcp",
        harmless=("1",),
    ),
    *moot(
        "there is no context parallelism",
        "--dcp-comm-backend",
        "--dcp-kv-cache-interleave-size",
        "--cp-kv-cache-interleave-size",
    ),
    *moot("there is no context parallelism", "--dcp-q-replicate", form="switch"),
    *moot(
        "the launcher starts every rank itself",
        "--distributed-executor-backend",
        "--data-parallel-backend -dpb",
        "--max-parallel-loading-workers",
    ),
    *moot(
        "a rank that hangs is ended after --hang-timeout-s",
        "--distributed-timeout-seconds",
        "--cpu-distributed-timeout-seconds",
        "--fault-tolerance-config",
    ),
    *moot("a lost worker is always replaced", "--enable-fault-tolerance", form="switch"),
    *moot(
        "set --cpu-threads, or start the launcher under numactl",
        "--numa-bind-nodes",
        "--numa-bind-cpus",
        form="values",
    ),
    *moot("set --cpu-threads, or start the launcher under numactl", "--numa-bind", form="switch"),
    *moot(
        _REPLICAS,
        "--data-parallel-supervisor-port",
        "--dp-supervisor-probe-interval-s",
        "--dp-supervisor-probe-timeout-s",
        "--dp-supervisor-probe-failure-threshold",
        "--dp-sync-interval",
        "--prefill-schedule-interval",
    ),
    *moot(_REPLICAS, "--disable-nccl-for-dp-synchronization", form="switch"),
    *moot(
        _ALL_REDUCE,
        "--enable-hc-sp",
        "--enable-batch-sharded-sampling",
        "--enable-dbo",
        "--enable-shm-tensor-arena",
        "--disable-custom-all-reduce",
        form="switch",
    ),
    *moot(
        _ALL_REDUCE,
        "--all2all-backend",
        "--ubatch-size",
        "--dbo-decode-token-threshold",
        "--dbo-prefill-token-threshold",
    ),
    *moot(_EXPERTS, "--enable-ep-weight-filter", "--enable-elastic-ep", "--enable-eplb", form="switch"),
    *moot(_EXPERTS, "--elastic-ep-max-dp-size", "--eplb-config", "--expert-placement-strategy"),
    *moot("profile with the device's own tools", "--ray-workers-use-nsight", form="switch"),
    *refused("would load code into the worker; omit it", "--worker-cls", harmless=("auto",)),
    *refused("would load code into the worker; omit it", "--worker-extension-cls", harmless=("",)),
]

CACHE = [
    *same("--block-size"),
    *same("--enable-prefix-caching", form="switch"),
    *mapped(
        "--gpu-memory-utilization --device-memory-utilization",
        "--kv-share",
        "has another base: vLLM counts this share of all memory for weights, graphs and KV cache together;"
        " --kv-share is the share of the memory left free by weights and graphs that the KV cache takes",
        convert=lambda text: [f"--kv-share={text}"],
    ),
    *mapped(
        "--kv-cache-memory-bytes",
        "--kv-memory",
        "is in GiB",
        convert=conversions.gib("--kv-memory"),
    ),
    *mapped(
        "--num-gpu-blocks-override",
        "--num-blocks",
        "includes the null block, as in vLLM",
        convert=conversions.count("--num-blocks"),
    ),
    *refused(
        "is not supported: KV caches have the model's type; omit it", "--kv-cache-dtype", harmless=("auto",)
    ),
    *moot("KV caches have the model's type", "--kv-cache-dtype-skip-layers", form="values"),
    *moot("prefixes are hashed with SHA-256", "--prefix-caching-hash-algo"),
    *moot("see --sub-block-cache", "--prefix-match-unit"),
    *moot(
        "the least recently used blocks go first; clients pin prefixes", "--prefix-cache-retention-interval"
    ),
    *moot("every layer of a prompt is computed", "--kv-sharing-fast-prefill", form="switch"),
    *moot("see --keep-windows", "--swa-bounded-replay", form="switch"),
    *refused(
        "is not supported; give the KV cache more memory with --kv-share or --kv-memory",
        "--kv-offloading-size",
        harmless=("0",),
    ),
    *moot("KV caches stay on the device", "--kv-offloading-backend"),
    *refused(
        "is not supported; use a quantized model (`triptych quantize`) or more ranks",
        "--cpu-offload-gb",
        "--offload-group-size",
        harmless=("0", "0.0"),
    ),
    *moot(
        "weights stay on the device",
        "--offload-backend",
        "--offload-num-in-group",
        "--offload-prefetch-step",
    ),
    *moot("weights stay on the device", "--cpu-offload-params", "--offload-params", form="values"),
]

SCHEDULER = [
    *same("--max-num-seqs"),
    *mapped(
        "--max-num-batched-tokens",
        "--max-num-batched-tokens",
        "is the length of one prompt's chunk; decode steps do not count against it",
        convert=conversions.count("--max-num-batched-tokens"),
        noted=True,
    ),
    *mapped(
        "--max-num-queued-reqs",
        "--max-waiting-requests",
        "counts requests that wait for a slot; vLLM counts running ones, too",
        convert=conversions.count("--max-waiting-requests"),
    ),
    *mapped(
        "--max-num-queued-tokens",
        "--max-waiting-tokens",
        "counts prompts of requests that wait for a slot; vLLM counts those in prefill, too",
        convert=conversions.count("--max-waiting-tokens"),
    ),
    *mapped(
        "--scheduling-policy",
        "--order",
        "is arrival for fcfs and priority-fair for priority, which is also fair between tenants",
        convert=conversions.choice("--order", {"fcfs": "arrival", "priority": "priority-fair"}),
    ),
    *moot("prompts are always prefilled in chunks", "--enable-chunked-prefill", form="switch"),
    *moot("plans are always made ahead of the worker", "--async-scheduling", form="switch"),
    *moot("a request starts when its blocks are free", "--scheduler-reserve-full-isl", form="switch"),
    *moot("see --decode-steps-per-chunk", "--long-prefill-token-threshold", "--max-num-scheduled-tokens"),
    *moot("see --decode-steps-per-chunk", "--long-prefill-token-threshold-adaptive", form="switch"),
    *moot("set --max-num-seqs", "--max-num-active-seqs"),
    *moot("a request starts when its blocks are free", "--watermark"),
    *moot(
        "each kind of attention always has blocks of its own",
        "--disable-hybrid-kv-cache-manager",
        form="switch",
    ),
    *moot("tokens are sent as they come", "--stream-interval"),
    *refused("would load code into the scheduler; see --order", "--scheduler-cls"),
]

COMPILATION = [
    *mapped(
        "--optimization-level",
        "--optimization-level",
        "also takes vLLM's older JSON with a level; -O N is the same",
        convert=compilation.optimization_level,
    ),
    *mapped(
        "--compilation-config -cc",
        "--compilation-config",
        "takes a level, or JSON whose mode or level and candidate_compile_sizes or compile_sizes count",
        convert=compilation.compilation_config,
    ),
    *moot(
        "graphs exist for the decode buckets; see --decode-buckets",
        "--cudagraph-capture-sizes",
        form="values",
    ),
    *moot(
        "graphs exist for the decode buckets; see --decode-bucket-strategy", "--max-cudagraph-capture-size"
    ),
    *moot("-O has the levels", "--performance-mode"),
]

OBSERVABILITY = [
    *same("--otlp-traces-endpoint"),
    *moot("spans cover queue, prefill and decode", "--collect-detailed-traces", form="values"),
    *moot("no metric is hidden", "--show-hidden-metrics-for-version"),
    *moot("there is no speculative decoding", "--per-request-spec-decode-metrics"),
    *moot(
        "/metrics always has all metrics",
        "--kv-cache-metrics",
        "--cudagraph-metrics",
        "--enable-mfu-metrics",
        "--enable-logging-iteration-details",
        form="switch",
    ),
    *moot("/metrics always has all metrics", "--kv-cache-metrics-sample", "--custom-histogram-buckets"),
    *moot("profile with the device's own tools", "--enable-layerwise-nvtx-tracing", form="switch"),
    *moot("a late graph is logged; see --compile-strict", "--jit-monitor-mode"),
    *moot("a late graph is logged; see --compile-strict", "--jit-monitor-verbose", form="switch"),
    *refused("is not supported; see --log-level and --log-format", "--logging-config", "--log-config-file"),
    *refused("is not supported; profile with the device's own tools", "--profiler-config", harmless=("{}",)),
]

ENGINE = [
    *moot(
        "there is no speculative decoding; answers are the same without",
        "--speculative-config -sc",
        "--spec-method",
        "--spec-model",
        "--spec-tokens",
    ),
    *moot("see --grammar-threads and its neighbours", "--structured-outputs-config"),
    *refused("is not supported; send the limits in the request", "--reasoning-config"),
    *refused("is not supported; omit it", "--watermark-config", "--diffusion-config -dc", "--engram-config"),
    *refused("is not supported; omit it", "--additional-config", "--aux-output-config", harmless=("{}",)),
    *refused(
        "is not supported: each replica prefills and decodes; omit it",
        "--kv-transfer-config",
        "--ec-transfer-config",
    ),
    *refused(
        "is not supported; subscribe to the scheduler's KV events, see docs/kv-events.md",
        "--kv-events-config",
    ),
    *refused("is not supported; restart the workers with the new weights", "--weight-transfer-config"),
]
