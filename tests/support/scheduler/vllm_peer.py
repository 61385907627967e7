"""vLLM's own scheduler and KV cache manager without a model, as a peer for measurements and comparisons.

Both are built as vLLM's engine core builds them: block hashes with SHA-256, one pool for all KV groups,
synchronous scheduling, neither EAGLE nor connectors. The model is a `config.json` of a few lines in a
temporary folder, without weights.
"""

import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from worker_svc.vllm_adapter import configuration, startup

VOCAB_SIZE: Final = 32_000
_CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "max_position_embeddings": 1 << 20,
    "vocab_size": VOCAB_SIZE,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


@cache
def prepare() -> None:
    """Imports vLLM with our platform, once per process, and seeds its block hashes."""
    startup.prepare("cpu")
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(sha256)


def _full_attention(block_size: int) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.float32)


def _kv_cache_config(windows: Sequence[int | None], num_blocks: int, block_size: int) -> Any:
    """Returns one KV group per entry: full attention for None, else a sliding window of that many tokens."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    specs = [
        _full_attention(block_size)
        if window is None
        else SlidingWindowSpec(
            block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.float32, sliding_window=window
        )
        for window in windows
    ]
    groups = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def _request(
    request_id: str, prompt: Sequence[int], max_tokens: int, block_size: int, cache_salt: str = ""
) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        pooling_params=None,
        cache_salt=cache_salt or None,
        block_hasher=get_request_block_hasher(block_size, sha256),
    )


class SchedulerPeer:
    """vLLM's `Scheduler`, synchronous, on one full-attention KV group."""

    def __init__(
        self, *, max_num_seqs: int, max_num_batched_tokens: int, block_size: int, num_blocks: int,
        max_model_len: int, prefix_caching: bool = True, log_stats: bool = True,
    ) -> None:  # fmt: skip
        """Builds the scheduler."""
        prepare()
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        config = _engine_config(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, block_size=block_size,
            max_model_len=max_model_len, enable_prefix_caching=prefix_caching,
        )  # fmt: skip
        config.cache_config.num_gpu_blocks = num_blocks
        self._block_size = block_size
        # Timed code calls `schedule` and `update_from_output` of vLLM's object directly.
        self.scheduler: Any = Scheduler(
            vllm_config=config,
            kv_cache_config=_kv_cache_config([None], num_blocks, block_size),
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=block_size,
            log_stats=log_stats,
        )

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> None:
        """Enqueues a request that generates `max_tokens` tokens."""
        self.scheduler.add_request(_request(request_id, prompt, max_tokens, self._block_size))

    @property
    def num_running(self) -> int:
        """Requests that hold KV blocks."""
        return len(self.scheduler.running)

    def result(self, plan: Any, token: int = 7) -> Any:
        """Returns a model's answer to a plan: `token` for each request that finishes its known tokens."""
        from vllm.v1.outputs import ModelRunnerOutput

        request_ids = list(plan.num_scheduled_tokens)
        requests = self.scheduler.requests
        sampled = [
            # schedule() has already counted this step's tokens as computed.
            [token] if requests[name].num_computed_tokens >= requests[name].num_tokens else []
            for name in request_ids
        ]
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={name: index for index, name in enumerate(request_ids)},
            sampled_token_ids=sampled,
        )

    def step(self) -> int:
        """Schedules, simulates the model and updates; returns the number of scheduled tokens."""
        plan = self.scheduler.schedule()
        self.scheduler.update_from_output(plan, self.result(plan))
        return int(plan.total_num_scheduled_tokens)


def _engine_config(**arguments: object) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
        configuration.register_model_class(folder, trust_remote_code=False)
        return EngineArgs(
            model=name, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, async_scheduling=False,
            **arguments,
        ).create_engine_config()  # fmt: skip


class KvCachePeer:
    """vLLM's `KVCacheManager`, driven as its scheduler drives it.

    There is a KV group for each window; None stands for full attention. All groups share one pool.
    """

    def __init__(
        self, windows: Sequence[int | None], *, num_blocks: int, block_size: int, max_model_len: int,
        chunk: int | None = None,
    ) -> None:  # fmt: skip
        """Builds the manager."""
        prepare()
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        self._block_size = block_size
        self._chunk = chunk or max_model_len
        self._requests: dict[str, Any] = {}
        self.manager: Any = KVCacheManager(
            _kv_cache_config(windows, num_blocks, block_size),
            max_model_len=max_model_len,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
            enable_caching=True,
        )

    @property
    def num_free(self) -> int:
        """Blocks that no request uses, cached ones included."""
        return int(self.manager.block_pool.get_num_free_blocks())

    @property
    def num_cached(self) -> int:
        """Blocks that a later request could hit."""
        return sum(block.block_hash is not None for block in self.manager.block_pool.blocks)

    def admit(self, request_id: str, token_ids: Sequence[int], cache_salt: str = "") -> int | None:
        """Admits a request and "computes" all of its tokens, chunk by chunk.

        Returns:
            The cached tokens, or None if the rest does not fit; nothing is held then.
        """
        request = _request(request_id, token_ids, 1 << 20, self._block_size, cache_salt)
        blocks, found, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
        hit = int(found)
        end = hit
        while end < len(token_ids):
            # A hit ends before the last token, so the first round always runs and takes the hit blocks.
            first = end == hit
            count = min(self._chunk, len(token_ids) - end)
            given = self.manager.allocate_slots(
                request, count, hit if first else 0, blocks if first else None, full_sequence_must_fit=first
            )
            if given is None:
                self.manager.free(request)
                return None
            end += count
            request.num_computed_tokens = end
        self._requests[request_id] = request
        return hit

    def append(self, request_id: str, token_ids: Sequence[int]) -> bool:
        """Generates these tokens one by one and computes all but the last.

        Returns:
            False if blocks ran out; the request is freed then.
        """
        request = self._requests[request_id]
        for token in token_ids:
            if request.num_computed_tokens < request.num_tokens:
                if self.manager.allocate_slots(request, 1) is None:
                    self.free(request_id)
                    return False
                request.num_computed_tokens += 1
            request.append_output_token_ids(token)
        return True

    def free(self, request_id: str) -> None:
        """Ends a request; its cached blocks stay until they are needed."""
        self.manager.free(self._requests.pop(request_id))
