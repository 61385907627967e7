"""Declares `causal_attention_naive` for prefill and decode."""

import rebel  # noqa: F401 - the vendor's module imports its Triton

from worker_svc.devices.rbln.ops import registry
from worker_svc.devices.rbln.ops.signatures import TRITON

registry.register(TRITON, ("causal_attention_naive_prefill", "causal_attention_naive_decode"))
