"""What `triptych up` can be told: flags, or `TRIPTYCH_*` variables of the same name."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from protos.logs import LogLevel
from protos.settings import ServiceSettings

# How long running requests may go on after Ctrl-C: less than the supervisor's patience, so that they end in order.
_GATEWAY_DRAIN_S = 5.0
_SCHEDULER_DRAIN_S = 2.0

OptionalCount = Annotated[int | None, Field(ge=1)]


class LaunchSettings(ServiceSettings):
    """One model on this machine. What is left unset is decided by the service that owns the setting."""

    model_config = SettingsConfigDict(cli_prog_name="triptych up", cli_shortcuts={"optimization-level": "O"})

    model: Annotated[
        str,
        Field(
            min_length=1,
            description="smollm2, gemma3-270m, minilm, a Hugging Face id, a local folder or a .gguf file.",
        ),
    ] = "smollm2"
    served_model_name: Annotated[
        str | None, Field(min_length=1, description="What clients call the model (default: --model).")
    ] = None
    host: Annotated[str, Field(min_length=1, description="Address that HTTP clients connect to.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Field(ge=0, le=65535, description="HTTP port; 0 takes a free one.")] = 8000
    scheduler_port: Annotated[
        int, Field(ge=0, le=65535, description="Port for direct gRPC clients; 0 takes a free one.")
    ] = 50051
    device: Annotated[
        Literal["auto", "cpu", "cuda", "rbln"], Field(description="What the workers run on.")
    ] = "auto"
    workers: Annotated[int, Field(ge=1, le=64, description="Copies of the model, one worker each.")] = 1
    run_dir: Annotated[Path, Field(description="Folder for pid files and logs.")] = Path("run")
    dtype: Annotated[
        str | None, Field(description="auto, bfloat16, float16 or float32: weights and activations.")
    ] = None
    load_format: Annotated[
        str | None, Field(description="auto, safetensors, gguf or dummy (made up weights, for measuring).")
    ] = None
    trust_remote_code: Annotated[
        bool | None, Field(description="Let Python code that comes with the model run in the workers.")
    ] = None
    max_model_len: Annotated[OptionalCount, Field(description="Longest prompt plus output, tokens.")] = None
    max_num_seqs: Annotated[OptionalCount, Field(description="Sequences that run at once.")] = None
    max_num_batched_tokens: Annotated[
        OptionalCount,
        Field(description="Tokens of one prefill chunk; it and --block-size divide one another."),
    ] = None
    block_size: Annotated[OptionalCount, Field(description="Tokens of one block of KV memory.")] = None
    num_blocks: Annotated[
        OptionalCount, Field(description="Blocks of KV memory (default: as many as it holds).")
    ] = None
    kv_memory: Annotated[
        float | None, Field(gt=0, description="Memory for KV, GiB (default: --kv-share of what is free).")
    ] = None
    kv_share: Annotated[
        float | None, Field(gt=0, le=1, description="Share of the free memory that KV takes.")
    ] = None
    enable_prefix_caching: Annotated[
        bool | None, Field(description="Keep the KV of prompts for later ones that begin alike.")
    ] = None
    pool_batch_sizes: Annotated[
        str | None, Field(description="Embedding models: rows of each static shape, for example 1,4.")
    ] = None
    pool_prompt_lens: Annotated[
        str | None, Field(description="Embedding models: tokens per row of the same shapes, as 4096,1024.")
    ] = None
    revision: Annotated[str | None, Field(description="Branch, tag or commit of a hub model.")] = None
    window_kv: Annotated[
        str | None, Field(description="auto, paged or in-place: how sliding windows are kept.")
    ] = None
    backend: Annotated[
        str | None, Field(description="auto, compiled or eager (for debugging): how steps run.")
    ] = None
    optimization_level: Annotated[
        int | None, Field(ge=0, le=3, description="-O: 0 eager to 3 all that the compiler can do.")
    ] = None
    compilation_config: Annotated[
        str | None, Field(description="vLLM's JSON: level, candidate_compile_sizes.")
    ] = None
    compile_cache_dir: Annotated[Path | None, Field(description="Where compiled code is kept.")] = None
    compile_cache: Annotated[bool | None, Field(description="Keep compiled code and find it again.")] = None
    compile_strict: Annotated[
        bool | None, Field(description="An error, not a warning, if a graph is made while serving.")
    ] = None
    enable_warm_up: Annotated[bool | None, Field(description="Make and run every graph before serving.")] = (
        None
    )
    rbln_backend: Annotated[
        str | None, Field(description="rbln, or rbln-check, which runs an NPU's graphs on this CPU.")
    ] = None
    require_precompiled: Annotated[bool | None, Field(description="Refuse to start rather than compile.")] = (
        None
    )
    tool_call_parser: Annotated[
        str | None, Field(description="How the model writes tool calls; see `triptych gateway --help`.")
    ] = None
    reasoning_parser: Annotated[
        str | None, Field(description="How the model thinks; see `triptych gateway --help`.")
    ] = None
    seed: Annotated[int | None, Field(ge=0, description="Where random numbers begin.")] = None
    log_level: Annotated[LogLevel, Field(description="Least severe level in the logs.")] = "info"


def gateway_flags(settings: LaunchSettings, port: int, scheduler_port: int) -> list[str]:
    """The gateway's part of the settings."""
    return [
        *("--host", settings.host, "--port", str(port)),
        *("--scheduler-address", f"127.0.0.1:{scheduler_port}"),
        *("--drain-timeout-s", str(_GATEWAY_DRAIN_S)),
        *_value("--tool-call-parser", settings.tool_call_parser),
        *_value("--reasoning-parser", settings.reasoning_parser),
        *_logging(settings),
    ]


def scheduler_flags(settings: LaunchSettings, port: int) -> list[str]:
    """The scheduler's part: memory, batches, and the model's public name."""
    return [
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--drain-s", str(_SCHEDULER_DRAIN_S)),
        *_value("--served-model-name", settings.served_model_name),
        *_value("--max-model-len", settings.max_model_len),
        *_value("--max-num-seqs", settings.max_num_seqs),
        *_value("--max-num-batched-tokens", settings.max_num_batched_tokens),
        *_value("--block-size", settings.block_size),
        *_value("--num-blocks", settings.num_blocks),
        *_switch("--enable-prefix-caching", settings.enable_prefix_caching),
        *_value("--pool-batch-sizes", settings.pool_batch_sizes),
        *_value("--pool-prompt-lens", settings.pool_prompt_lens),
        *_logging(settings),
    ]


def worker_flags(settings: LaunchSettings, port: int, scheduler_port: int) -> list[str]:
    """Each worker's part: the model, the device, and its share of the cores."""
    return [
        *("--model", settings.model, "--device", settings.device),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--scheduler-address", f"127.0.0.1:{scheduler_port}"),
        *_value("--dtype", settings.dtype),
        *_value("--load-format", settings.load_format),
        *_switch("--trust-remote-code", settings.trust_remote_code),
        *_value("--kv-memory", settings.kv_memory),
        *_value("--kv-share", settings.kv_share),
        *_value("--seed", settings.seed),
        *_value("--revision", settings.revision),
        *_value("--window-kv", settings.window_kv),
        *_value("--backend", settings.backend),
        *_value("--rbln-backend", settings.rbln_backend),
        *_switch("--compile-cache", settings.compile_cache),
        *_switch("--compile-strict", settings.compile_strict),
        *_switch("--enable-warm-up", settings.enable_warm_up),
        *_value("--optimization-level", settings.optimization_level),
        *_value("--compilation-config", settings.compilation_config),
        *_value("--compile-cache-dir", settings.compile_cache_dir),
        *_switch("--require-precompiled", settings.require_precompiled),
        *_value("--cpu-threads", _share_of_cores(settings.workers)),
        *_logging(settings),
    ]


def worker_environment(settings: LaunchSettings, index: int) -> dict[str, str]:
    """Gives each of several workers a device of its own: the `index`-th of those that the launcher may use."""
    variable = {"cuda": "CUDA_VISIBLE_DEVICES", "rbln": "RBLN_DEVICES"}.get(settings.device)
    if settings.workers == 1 or variable is None:
        return {}
    visible = [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]
    if not visible:
        return {variable: str(index)}
    return {variable: visible[index % len(visible)]}


def _share_of_cores(workers: int) -> int | None:
    return None if workers == 1 else max(1, len(os.sched_getaffinity(0)) // workers)


def _value(flag: str, value: object) -> list[str]:
    return [] if value is None else [flag, str(value)]


def _switch(flag: str, value: bool | None) -> list[str]:
    return [] if value is None else [flag if value else flag.replace("--", "--no-", 1)]


def _logging(settings: LaunchSettings) -> list[str]:
    # JSON always: the launcher reads progress from the logs.
    return ["--log-level", settings.log_level, "--log-format", "json"]
