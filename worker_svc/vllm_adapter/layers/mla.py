"""Multi-head latent attention (MLA) of DeepSeek V2 and V3, over a paged cache of latent vectors.

A token's keys and values of all heads are products of a latent vector, so the cache holds this vector and
the rotated key of all heads. Neither a prefill chunk nor a decode step expands it: the matrix of the keys is
applied to the queries, and the matrix of the values to the result ("absorbed", in
https://arxiv.org/abs/2405.04434, section 2.1.2). All heads then share a key head.
"""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mla import MLAModules, MultiHeadLatentAttentionWrapper

from protos.errors import ConfigurationRefused
from worker_svc.devices.attention import AttentionCall, AttentionParams
from worker_svc.vllm_adapter.attention import attend


@MultiHeadLatentAttentionWrapper.register_oot
class LatentAttention(MultiHeadLatentAttentionWrapper):
    """The attention of a layer, from the hidden states to the output projection."""

    def __init__(
        self,
        hidden_size: int,  # noqa: ARG002 - vLLM's interface
        num_heads: int,
        scale: float,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        mla_modules: MLAModules,
        cache_config: Any = None,  # noqa: ARG002 - blocks are ours
        quant_config: Any = None,  # noqa: ARG002 - the modules are built already
        prefix: str = "",
        **rest: Any,  # noqa: ARG002 - of sparse and speculative forms
    ) -> None:
        torch.nn.Module.__init__(self)
        if mla_modules.is_sparse:
            raise ConfigurationRefused("models with sparse attention are not served; choose another model")
        projection: Any = mla_modules.kv_b_proj
        # Our products read its rows in place, so that they must keep their layout. `QuantizedLayers` refuses
        # quantized ones.
        projection._cpu_skip_gemm_dispatch = True  # noqa: SLF001 - vLLM's own mark for this projection
        self.num_heads = num_heads
        self.sizes = (qk_nope_head_dim, qk_rope_head_dim)
        self.v_head_dim, self.q_lora_rank, self.kv_lora_rank = v_head_dim, q_lora_rank, kv_lora_rank
        self.kv_b_proj = projection
        self.modules_of_layer = mla_modules
        self.attn = LatentCache(f"{prefix}.attn", num_heads, kv_lora_rank, qk_rope_head_dim, scale)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        llama_4_scaling: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps hidden states [tokens, hidden] to [tokens, hidden]."""
        modules: Any = self.modules_of_layer
        rope = self.sizes[1]
        if self.q_lora_rank is None:
            query = modules.q_proj(hidden_states)[0]
            compressed = modules.kv_a_proj_with_mqa(hidden_states)[0]
        else:
            joint = modules.fused_qkv_a_proj(hidden_states)[0]
            latent_query, compressed = joint.split([self.q_lora_rank, self.kv_lora_rank + rope], dim=-1)
            query = modules.q_b_proj(modules.q_a_layernorm(latent_query.contiguous()))[0]
        latent, shared_key = compressed.split([self.kv_lora_rank, rope], dim=-1)
        latent = modules.kv_a_layernorm(latent.contiguous())
        query_part, rotated = query.view(-1, self.num_heads, sum(self.sizes)).split(self.sizes, dim=-1)
        rotated, shared_key = rotated.contiguous(), shared_key.unsqueeze(1).contiguous()
        if modules.rotary_emb is not None:
            rotated, shared_key = modules.rotary_emb(positions, rotated, shared_key)
        # [heads, nope + value, latent], as the projection stores it.
        expansion = self.kv_b_proj.weight.view(self.num_heads, -1, self.kv_lora_rank)
        of_keys, of_values = expansion.split([self.sizes[0], self.v_head_dim], dim=1)
        absorbed = torch.bmm(query_part.transpose(0, 1), of_keys).transpose(0, 1)
        wide_query = torch.cat((absorbed, rotated), dim=-1)
        if llama_4_scaling is not None:
            wide_query = wide_query * llama_4_scaling
        mixed = self.attn(wide_query, torch.cat((latent.unsqueeze(1), shared_key), dim=-1))
        attended = torch.bmm(mixed.transpose(0, 1), of_values.transpose(1, 2)).transpose(0, 1)
        attended = attended.reshape(-1, self.num_heads * self.v_head_dim)
        if modules.g_proj is not None:
            attended = attended * modules.g_proj(hidden_states)[0].sigmoid()
        output: torch.Tensor = modules.o_proj(attended)[0]
        return output


class LatentCache(torch.nn.Module):
    """The part with a cache, with the attributes of vLLM's attention layers that the adapter reads."""

    sliding_window = None
    kv_sharing_target_layer_name = None
    num_kv_heads = 1

    def __init__(self, name: str, num_heads: int, latent: int, rope: int, scale: float) -> None:
        super().__init__()
        self.num_heads, self.head_size = num_heads, latent + rope
        self.kv_cache_torch_dtype = torch.get_default_dtype()
        self.layer_name = name
        params = AttentionParams(num_heads, 1, self.head_size, scale, 0, 0.0, writes=True, latent=latent)
        self.impl = SimpleNamespace(params=params)
        self.kv_cache = torch.tensor([])
        layers = get_current_vllm_config().compilation_config.static_forward_context
        layers[name] = self

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Attends with queries [tokens, heads, latent + rope] and keys [tokens, 1, latent + rope].

        Returns [tokens, heads, latent].
        """
        params = self.impl.params
        output = query.new_empty(query.shape[0], params.num_heads, params.latent)
        plans: Any = get_forward_context().attn_metadata
        call = AttentionCall(params, query, key, None, self.kv_cache, output)
        return attend(call, plans[self.layer_name])
