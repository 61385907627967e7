"""The scheduler's settings.

A flag (`--block-size`) comes before a `TRIPTYCH_*` variable, and that before the variable of a vLLM-RBLN or
vLLM-Spyre deployment.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from protos.service.common_settings import LinkSecuritySettings
from protos.service.settings import Group
from scheduler_svc.adapters.registry import name_and_path, split_modules
from scheduler_svc.policy.order import SHORTEST_AGEING_S
from scheduler_svc.shapes.buckets import (
    SMALLEST_CHUNK,
    BucketStrategy,
    decode_buckets,
    divides,
    prefill_buckets,
)

_BUCKET = "VLLM_RBLN_DECODE_BATCH_BUCKET"


class Settings(LinkSecuritySettings):
    """Schedules requests to the workers that register. An unset size takes the default of the workers."""

    model_config = SettingsConfigDict(cli_prog_name="triptych scheduler", use_attribute_docstrings=True)

    section: ClassVar[str] = "scheduler"
    groups: ClassVar[Mapping[Group, tuple[str, ...]]] = {
        Group.MODEL: ("expect_model", "served_model_name", "max_model_len"),
        Group.BATCHING: (
            "max_num_seqs",
            "max_num_batched_tokens",
            "prefill_bucket_strategy",
            "prefill_bucket_min",
            "prefill_bucket_step",
            "prefill_bucket_limit",
            "prefill_buckets",
            "decode_steps_per_chunk",
            "ttft_target_ms",
            "itl_target_ms",
            "lease_steps",
            "event_interval_ms",
            "decode_bucket_strategy",
            "decode_bucket_min",
            "decode_bucket_step",
            "decode_bucket_limit",
            "decode_buckets",
        ),
        Group.KV_MEMORY: (
            "block_size",
            "num_blocks",
            "enable_prefix_caching",
            "sub_block_cache",
            "cache_generated_tokens",
            "keep_windows",
            "windows_kept_per_slot",
        ),
        Group.LORA: ("lora_modules",),
        Group.POOLING: ("pool_batch_sizes", "pool_prompt_lens"),
        Group.QUEUE: (
            "order",
            "ageing_s",
            "tenant_weights",
            "max_waiting_requests",
            "max_waiting_tokens",
            "max_worker_losses",
            "max_step_failures",
            "max_unread_tokens_per_stream",
            "max_unread_stream_tokens",
        ),
        Group.ADDRESSES: ("port",),
        Group.TIMEOUTS: (
            "step_timeout_s",
            "detach_after_failed_steps",
            "replica_wait_s",
            "queue_timeout_s",
            "token_timeout_s",
            "drain_s",
        ),
        Group.LOGGING: ("state_dir", "batchsize_log_interval_s"),
    }

    reference_names: ClassVar[Mapping[str, str | tuple[str, ...]]] = {
        "decode_bucket_strategy": f"{_BUCKET}_STRATEGY",
        "decode_bucket_min": f"{_BUCKET}_MIN",
        "decode_bucket_step": f"{_BUCKET}_STEP",
        "decode_bucket_limit": f"{_BUCKET}_LIMIT",
        "decode_buckets": f"{_BUCKET}_MANUAL_BUCKETS",
        "pool_batch_sizes": ("VLLM_SPYRE_WARMUP_BATCH_SIZES", "SENDNN_INFERENCE_WARMUP_BATCH_SIZES"),
        "pool_prompt_lens": ("VLLM_SPYRE_WARMUP_PROMPT_LENS", "SENDNN_INFERENCE_WARMUP_PROMPT_LENS"),
        "sub_block_cache": "VLLM_RBLN_SUB_BLOCK_CACHE",
        "batchsize_log_interval_s": "VLLM_LOG_BATCHSIZE_INTERVAL",
    }

    port: int = Field(50051, ge=0, le=65535)
    """Port to listen on; 0 for any free one."""
    expect_model: str = Field("", validate_default=False)
    """Name of the only model to serve: a Hugging Face id, or the name of a folder. Default: the first worker
    decides."""
    served_model_name: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], NoDecode] = ()
    """Names of the model in requests, for example llama llama-3.1-8b. Answers and metrics use the first.
    Default: the worker's model id or folder name."""
    max_model_len: int | None = Field(None, ge=2)
    """Longest sequence (prompt plus output), tokens. Default: the model's context."""
    max_num_seqs: int | None = Field(None, ge=1, le=4096)
    """Most running sequences of a replica. Default: the worker's."""
    max_num_batched_tokens: int | None = Field(None, ge=1)
    """Tokens of the largest prefill chunk. Default: the worker's."""
    prefill_bucket_strategy: BucketStrategy = "exponential"
    """Choice of the compiled chunk sizes (prefill buckets): exponential (exp), linear or manual."""
    prefill_bucket_min: int = Field(SMALLEST_CHUNK, ge=1)
    """Smallest prefill bucket, tokens."""
    prefill_bucket_step: int = Field(2, ge=1)
    """Divisor (exponential) or difference (linear) between neighbouring prefill buckets."""
    prefill_bucket_limit: int = Field(4, ge=1)
    """Largest number of prefill buckets, the chunk included; 1 pads every chunk to the full size."""
    prefill_buckets: Annotated[tuple[int, ...], NoDecode] = ()
    """Manual prefill buckets, for example 64,256,512, whatever the strategy. The largest is the chunk."""
    block_size: int | None = Field(None, ge=1)
    """Tokens of a KV block. Must divide the prefill chunk or be a multiple of it. Default: the worker's."""
    num_blocks: int | None = Field(None, ge=2)
    """KV blocks per group and replica, the null block included. Default: as many as the worker's memory
    allows."""
    enable_prefix_caching: bool = Field(True)
    """Reuse the KV cache of prompt prefixes computed before."""
    sub_block_cache: bool = Field(True)
    """Let a prefix hit end inside a block and copy the start of that block. Otherwise hits end at blocks."""
    cache_generated_tokens: bool = Field(True)
    """Also cache generated tokens. Where chunks are not exact, they are rounded as decode steps round."""
    keep_windows: Literal["junctions", "ends"] = "junctions"
    """In-place sliding windows to cache: those at all chunk boundaries, the most valuable longest
    (junctions), or only those at the ends of prompts and where prompts diverge (ends)."""
    windows_kept_per_slot: int = Field(4, ge=0, le=1024)
    """Cached sliding windows per slot of a worker, in addition to those in use."""
    decode_steps_per_chunk: int = Field(1, ge=0, le=1000)
    """Decode steps between two prefill chunks when both are due and no target says otherwise; 0 runs all
    prefill first, which stalls decoding."""
    ttft_target_ms: float = Field(0.0, ge=0)
    """Aim for the time from a request's arrival to its first token: a prompt about to miss it is prefilled at
    once; a prompt too late for it takes turns. 0 for none."""
    itl_target_ms: float = Field(0.0, ge=0)
    """Aim for the time between two tokens of a request: prefill chunks are as large as fit, and follow one
    another as long as they fit. 0 for none."""
    lease_steps: int = Field(8, ge=1, le=1000)
    """Most consecutive decode steps of a worker on its own, without other work."""
    # A worker silent for longer could count as lost.
    event_interval_ms: float | None = Field(None, ge=0, le=1000)
    """Milliseconds for a worker to collect the tokens of consecutive decode steps before it sends them; 0
    sends those of each step at once. Default: 5 in batches of 32 rows or more, else 0."""
    decode_bucket_strategy: BucketStrategy = "exponential"
    """Choice of the compiled decode batch sizes (buckets): exponential (exp), linear or manual."""
    decode_bucket_min: int = Field(1, ge=1)
    """Smallest bucket."""
    decode_bucket_step: int = Field(2, ge=1)
    """Divisor (exponential) or difference (linear) between neighbouring buckets."""
    decode_bucket_limit: int = Field(16, ge=1)
    """Largest number of buckets."""
    decode_buckets: Annotated[tuple[int, ...], NoDecode] = ()
    """Buckets of the manual strategy, for example 1,2,4,8."""
    pool_batch_sizes: Annotated[tuple[int, ...], NoDecode] = ()
    """Rows of each static shape of a pooling model, for example 1,4. Default: shapes for every prompt up to
    the model's context."""
    pool_prompt_lens: Annotated[tuple[int, ...], NoDecode] = Field((), validate_default=True)
    """Tokens per row of each of these shapes, in the same order, for example 4096,1024."""
    lora_modules: Annotated[tuple[str, ...], NoDecode] = ()
    """LoRA adapters to load when the first worker is ready, each as name=path or as JSON with these keys, for
    example sql=/adapters/sql chat=/adapters/chat. The workers need --enable-lora."""
    order: Literal["priority-fair", "arrival"] = "priority-fair"
    """Order of the queue: by priority, then fairly between tenants, then by arrival (priority-fair), or by
    arrival alone."""
    ageing_s: float = Field(30.0, ge=0)
    """Seconds of waiting worth a level of priority below the most urgent waiting request; 0 for never."""
    tenant_weights: Annotated[dict[str, float], NoDecode] = Field(default_factory=dict)
    """Weights of tenants, for example paid=4,trial=0.5. All other tenants have weight 1."""
    max_waiting_requests: int = Field(1024, ge=1)
    """Most requests waiting for a slot. Further requests are refused with RESOURCE_EXHAUSTED. Beyond half of
    this number, each tenant gets its share of the queue; in a full queue, its share of half as many more."""
    max_waiting_tokens: int = Field(1_000_000, ge=1)
    """Most prompt tokens of all requests waiting for a slot, shared in the same way."""
    max_worker_losses: int = Field(2, ge=1, le=100)
    """Consecutive losses of workers while running the same request. The request then fails, but only if the
    last worker ran nothing else in its step."""
    max_step_failures: int = Field(4, ge=1, le=100)
    """Consecutive failures of steps with the same request. The request then fails, if it ran alone and failed
    on every worker. Set more than --detach-after-failed-steps: a broken worker then goes first."""
    max_unread_tokens_per_stream: int = Field(1 << 19, ge=1024)
    """Most tokens not yet read by the client of a gRPC stream, including log-probabilities. Beyond it, the
    stream ends with RESOURCE_EXHAUSTED, and its requests are aborted; gateways resubmit theirs."""
    max_unread_stream_tokens: int = Field(1 << 20, ge=1024)
    """Most unread tokens of all gRPC streams together. Beyond it, the stream with the most ends in the same
    way."""
    step_timeout_s: float = Field(120.0, gt=0)
    """Seconds before an unanswered step marks the worker lost. Shrinks to 20 times the usual step time
    (minimum 5 s) once known."""
    detach_after_failed_steps: int = Field(3, ge=1, le=1000)
    """Consecutive failed steps before a worker loses its registration for a while."""
    replica_wait_s: float = Field(120.0, ge=0)
    """Seconds for accepted requests to wait for a worker when none is left."""
    queue_timeout_s: float = Field(0.0, ge=0, le=604_800)
    """Seconds before a request without a first slot fails with DEADLINE_EXCEEDED (HTTP 503); 0 for no limit.
    Time under an earlier scheduler counts."""
    token_timeout_s: float = Field(3600.0, ge=0, le=604_800)
    """Seconds without a new token, from the first slot on, before a request fails with DEADLINE_EXCEEDED
    (HTTP 503), whatever the reason; 0 for no limit."""
    state_dir: Path | None = None
    """Folder for the batch size histogram, kept across restarts and read by triptych plan. Default: none is
    kept."""
    batchsize_log_interval_s: float = Field(0.0)
    """Seconds between two log entries of the decode batch sizes; 0 or below for none."""
    drain_s: float = Field(30.0, ge=0, le=3600)
    """How long running requests may continue after SIGTERM or SIGINT, seconds."""

    @field_validator(
        "prefill_buckets", "decode_buckets", "pool_batch_sizes", "pool_prompt_lens", mode="before"
    )
    @classmethod
    def _split(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        return tuple(part.strip() for part in value.split(",") if part.strip())

    @field_validator("prefill_bucket_strategy", "decode_bucket_strategy", mode="before")
    @classmethod
    def _lower_case(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value  # as in vLLM-RBLN

    @field_validator("pool_batch_sizes", "pool_prompt_lens")
    @classmethod
    def _at_least_one(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if bad := [number for number in value if number < 1]:
            raise ValueError(f"must hold numbers from 1, not {bad[0]}")
        return value

    @field_validator("pool_prompt_lens")
    @classmethod
    def _as_many(cls, value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        batches = info.data.get("pool_batch_sizes")
        if batches is not None and len(batches) != len(value):
            raise ValueError(
                f"must hold one length for each of pool_batch_sizes: {len(batches)} batch sizes and {len(value)} lengths are set"
            )
        return value

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _names(cls, value: object) -> object:
        return tuple(value.split(",")) if isinstance(value, str) else value

    @field_validator("lora_modules", mode="before")
    @classmethod
    def _modules(cls, value: object) -> object:
        return split_modules(value) if isinstance(value, str) else value

    @field_validator("lora_modules")
    @classmethod
    def _distinct(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = [name_and_path(module)[0] for module in value]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"names {twice[0]!r} twice")
        return value

    @field_validator("tenant_weights", mode="before")
    @classmethod
    def _weights(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        if value.startswith("{"):
            return json.loads(value)
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        if any(not equals or not name.strip() for name, equals, _ in pairs):
            raise ValueError("expected name=weight pairs, for example paid=4,trial=0.5")
        return {name.strip(): weight.strip() for name, _, weight in pairs}

    @field_validator("tenant_weights")
    @classmethod
    def _positive(cls, value: dict[str, float]) -> dict[str, float]:
        if bad := [name for name, weight in value.items() if not 0 < weight < math.inf]:
            raise ValueError(f"the weight of {bad[0]} must be above 0")
        return value

    @field_validator("ageing_s")
    @classmethod
    def _coarse(cls, value: float) -> float:
        if 0 < value < SHORTEST_AGEING_S:
            raise ValueError(f"must be 0 or at least {SHORTEST_AGEING_S:g}")
        return value

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        """Checks the sizes, as far as that is possible without knowing the worker."""
        chunk, block = self.chunk(0), self.block_size
        if chunk and block and not divides(chunk, block):
            raise ValueError(
                f"max_num_batched_tokens {chunk} (the prefill chunk) and block_size {block} must divide one another"
            )
        self.chunk_sizes(chunk or SMALLEST_CHUNK, block or 1)
        most = self.max_num_seqs
        if self.decode_bucket_strategy == "manual":
            # Without max_num_seqs, the largest manual bucket is the largest batch. With it, the largest batch
            # is max_num_seqs // stages, and only the worker knows its pipeline stages.
            largest = max((1, *self.decode_buckets))
            if most is None or (largest <= most and most // (most // largest) == largest):
                most = largest
        if most is not None:
            self.buckets(most)
        return self

    def chunk(self, default: int) -> int:
        """Returns the tokens of the largest prefill chunk; `default` if the settings leave it open."""
        return self.max_num_batched_tokens or max(self.prefill_buckets, default=default)

    def chunk_sizes(self, chunk: int, block_size: int) -> tuple[int, ...]:
        """Returns the prefill buckets for chunks of up to `chunk` tokens.

        Raises:
            ValueError: a setting breaks a rule; the text names both.
        """
        return prefill_buckets(
            "manual" if self.prefill_buckets else self.prefill_bucket_strategy,
            chunk=chunk,
            block_size=block_size,
            minimum=self.prefill_bucket_min,
            step=self.prefill_bucket_step,
            limit=self.prefill_bucket_limit,
            manual=self.prefill_buckets,
        )

    def buckets(self, max_batch: int) -> tuple[int, ...]:
        """Returns the decode buckets for batches of up to `max_batch` rows.

        Raises:
            ValueError: a setting breaks a rule; the text names both.
        """
        return decode_buckets(
            self.decode_bucket_strategy,
            max_batch=max_batch,
            minimum=self.decode_bucket_min,
            step=self.decode_bucket_step,
            limit=self.decode_bucket_limit,
            manual=self.decode_buckets,
        )
