"""Declares `causal_attention_naive` for prefill and decode."""

import rebel  # noqa: F401 - the vendor's module imports its Triton

from worker_svc.devices.rbln import operators
from worker_svc.devices.rbln.operators import TRITON

operators.register(TRITON, ("causal_attention_naive_prefill", "causal_attention_naive_decode"))
