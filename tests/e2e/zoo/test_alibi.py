"""ALiBi on CPUs and GPUs, compared with attention computed token by token."""

import pytest
import torch

from tests.support.attention import naive_attention
from worker_svc.devices.attention import AttentionCall, AttentionParams, PagedInput
from worker_svc.devices.base import Device
from worker_svc.devices.cpu.device import CpuDevice
from worker_svc.devices.cuda.device import CudaDevice
from worker_svc.shapes import AttentionLayer, KvGroup
from worker_svc.vllm_adapter import startup

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore"),  # importing vLLM
]

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 4, 2, 32, 32, 5
SLOPES = (0.5, 0.25, 0.125, 0.0625)
PARAMS = AttentionParams(HEADS, KV_HEADS, SIZE, 0.2, 0, 0.0, writes=True, slopes=SLOPES)
TABLE = torch.tensor([[3, 1]], dtype=torch.int32)
LENGTH = 40


@pytest.mark.parametrize(
    ("device", "dtype"),
    [(CpuDevice(), torch.float32), (CpuDevice(), torch.bfloat16), (CudaDevice(), torch.float32)],
    ids=["cpu", "cpu in bfloat16", "cuda"],
)
def test_scores_fall_with_the_distance(device: Device, dtype: torch.dtype) -> None:
    """A chunk and a decode step give each head its own slope; the GPU's form runs on this host."""
    startup.prepare("cpu")
    generator = torch.Generator().manual_seed(0)
    group = KvGroup(0, (AttentionLayer("a", HEADS, KV_HEADS, SIZE, 0, dtype, alibi=True),))
    cache = torch.zeros(device.cache_shape(group, BLOCKS, BLOCK), dtype=dtype)
    keys, values = torch.randn(2, LENGTH, KV_HEADS, SIZE, generator=generator).to(dtype)
    queries = torch.randn(LENGTH, HEADS, SIZE, generator=generator).to(dtype)
    output = torch.empty_like(queries)
    for start, end in ((0, 32), (32, LENGTH - 1), (LENGTH - 1, LENGTH)):
        places = TABLE[0, torch.arange(start, end) // BLOCK] * BLOCK + torch.arange(start, end) % BLOCK
        step = PagedInput(
            torch.tensor([end], dtype=torch.int32), torch.tensor([0, end - start], dtype=torch.int32), TABLE,
            places, end - start,
        )  # fmt: skip
        rows = slice(start, end)
        call = AttentionCall(PARAMS, queries[rows], keys[rows], values[rows], cache, output[rows])
        device.attend(call, device.plan(group, BLOCK, step))
    wanted = naive_attention(PARAMS, queries.float(), keys, values)
    assert torch.allclose(output.float(), wanted, atol=1e-5 if dtype == torch.float32 else 2e-2)
