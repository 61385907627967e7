"""A model of Llama 3.2 1B's shape with made-up weights, in this process and behind the three services.

The benches of a whole GPU share it.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from worker_svc.execution.worker import Worker
from worker_svc.settings import Settings
from worker_svc.shapes import ShapeConfig

BLOCK: Final = 128
CHUNK: Final = 512
KV_GIB: Final = 24
SERVED_NAME: Final = "bench"
"""The model's name in requests."""
VOCAB_SIZE: Final = 128_256
_PORT: Final = 18_000
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


@contextmanager
def serving(
    folder: Path, batches: Sequence[int], max_model_len: int, gateways: int = 1
) -> Iterator[tuple[str, int]]:
    """Runs the services for the block; yields the gateway's URL and the launcher's process id."""
    flags = [
        "--model", str(folder), "--device", "cuda", "--load-format", "dummy", "--kv-memory", str(KV_GIB),
        "--served-model-name", SERVED_NAME, "--max-model-len", str(max_model_len),
        "--max-num-batched-tokens", str(CHUNK), "--block-size", str(BLOCK), "--run-dir", str(folder / "run"),
        *bucket_flags(batches), *(("--gateways", str(gateways)) if gateways > 1 else ()),
    ]  # fmt: skip
    with launched(*flags) as running:
        yield running


def bucket_flags(batches: Sequence[int]) -> list[str]:
    """Returns the flags of a stack that decodes in these batches."""
    buckets = ",".join(map(str, sorted(batches)))
    return [
        "--max-num-seqs", str(max(batches)), "--decode-bucket-strategy", "manual", "--decode-buckets", buckets
    ]  # fmt: skip


@contextmanager
def launched(*flags: str) -> Iterator[tuple[str, int]]:
    """Runs `triptych up` for the block; yields the gateway's URL and the launcher's process id.

    Raises:
        RuntimeError: if it ends before it serves.
    """
    command = [sys.executable, "-m", "deploy.cli", "up", "--port", str(_PORT), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stderr.write(line)
            if "curl " in line:
                break
        else:
            raise RuntimeError("the services exited before they served")
        yield f"http://127.0.0.1:{_PORT}", process.pid
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
