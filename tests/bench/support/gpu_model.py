"""A model of Llama 3.2 1B's shape with made-up weights, in this process and behind the three services.

The benches of a whole GPU share it.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from protos.steps import Admission, Decode, Prefill, StepPlan
from tests.bench.support.contenders import launched
from tests.support.sampling_params import sampling_params
from worker_svc.execution.worker import Worker
from worker_svc.settings import Settings
from worker_svc.shapes import ShapeConfig

BLOCK: Final = 128
CHUNK: Final = 512
KV_GIB: Final = 24
SERVED_NAME: Final = "bench"
"""The model's name in requests."""
VOCAB_SIZE: Final = 128_256
CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True, "dtype": "bfloat16", "hidden_act": "silu", "attention_bias": False,
    "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
"""The model's config.json."""


def model_folder(parent: Path, config: Mapping[str, Any] = CONFIG) -> Path:
    """Makes a folder with the configuration and, for the gateway, a tokenizer with a word per token id."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = parent / "made-up"
    folder.mkdir(parents=True)
    end = config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {end}}}')
    words = {f"w{index}": index for index in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))  # noqa: S106 - a word
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        f'{{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w{end}"}}'
    )
    return folder


def memory_bandwidth(device: torch.device | str, passes: int) -> float:
    """Returns the bytes per second that a sum reads, the best of `passes`: 4 GiB on a GPU, else 1 GiB."""
    on_gpu = torch.device(device).type == "cuda"
    data = torch.ones(1 << (30 if on_gpu else 28), device=device)
    seconds = []
    for _ in range(passes):
        started = time.perf_counter()
        data.sum().item()
        seconds.append(time.perf_counter() - started)
    return data.nbytes / min(seconds)


def open_worker(folder: Path, batches: Sequence[int], max_model_len: int) -> Worker:
    """Returns a worker in this process, configured for these decode batches."""
    worker = Worker(Settings(model=str(folder), device="cuda", load_format="dummy", kv_memory=KV_GIB))
    worker.prepare()
    blocks = 1 + max(batches) * (max_model_len // BLOCK)
    worker.configure(
        ShapeConfig(max_model_len, max(batches), CHUNK, BLOCK, tuple(batches), (blocks,)),
        lambda phase, done, total, what: print(phase, done, total, what, file=sys.stderr),
    )
    return worker


class Rows:
    """Decodes one batch again and again."""

    def __init__(self, worker: Worker, batch: int, context: int) -> None:
        """Prepares for rows of `context` tokens, most of which are never computed."""
        self._worker, self._batch, self._context = worker, batch, context
        self._number = 0

    def run(self, adapters: Sequence[int], steps: int) -> list[float]:
        """Returns the seconds of each step of a batch whose rows have these adapters; 0 is the base model."""
        width = -(-(self._context + steps + 1) // BLOCK)
        for slot, adapter in enumerate(adapters):
            blocks = {0: tuple(range(1 + slot * width, 1 + (slot + 1) * width))}
            known = tuple(range(100, 100 + self._context))
            request = Admission(
                slot, known, self._context - 1, sampling_params(temperature=0.0), blocks, adapter_id=adapter
            )
            self._execute(admit=[request], work=Prefill(slot, self._context - 1, 1, sample=True))
        taken = []
        work = Decode(range(self._batch), self._batch)
        for _ in range(steps):
            started = time.perf_counter()
            self._execute(work=work)
            taken.append(time.perf_counter() - started)
        self._execute(release=list(range(self._batch)))
        return taken[2:]

    def _execute(self, **fields: Any) -> None:
        self._number += 1
        self._worker.execute(StepPlan(self._number, **fields))


@contextmanager
def serving(folder: Path, batches: Sequence[int], max_model_len: int, gateways: int = 1) -> Iterator[str]:
    """Runs the services for the block; yields the gateway's URL."""
    flags = [
        "--model", str(folder), "--device", "cuda", "--load-format", "dummy", "--kv-memory", str(KV_GIB),
        "--served-model-name", SERVED_NAME, "--max-model-len", str(max_model_len),
        "--max-num-batched-tokens", str(CHUNK), "--block-size", str(BLOCK), "--run-dir", str(folder / "run"),
        *bucket_flags(batches), *(("--gateways", str(gateways)) if gateways > 1 else ()),
    ]  # fmt: skip
    with launched(*flags) as url:
        yield url


def bucket_flags(batches: Sequence[int]) -> list[str]:
    """Returns the flags of a stack that decodes in these batches."""
    buckets = ",".join(map(str, sorted(batches)))
    return [
        "--max-num-seqs", str(max(batches)), "--decode-bucket-strategy", "manual", "--decode-buckets", buckets
    ]  # fmt: skip
