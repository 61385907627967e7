"""The attention operators that rebel-compiler lowers to NPU kernels, with references of them that run on a CPU.

``signatures`` says what their arguments are, ``checks`` what shapes these have, ``reference`` what they compute, ``registry`` makes
torch operators of it. Sources: the wheels vllm-rbln 0.12.0 and 0.11.2, with which ``tests/contract/worker/test_rbln_wheels.py`` compares.
"""

from worker_svc.devices.rbln_ops.registry import emit, register
from worker_svc.devices.rbln_ops.signatures import CUSTOM, NAMESPACES, TRITON, Namespace

__all__ = ["CUSTOM", "NAMESPACES", "TRITON", "Namespace", "emit", "register"]
