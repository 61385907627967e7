"""An example for each heading of `--help`."""

from collections.abc import Collection, Mapping
from typing import Final

_EXAMPLES: Final[Mapping[str, tuple[str, ...]]] = {
    "Model": (
        "--model Qwen/Qwen3-0.6B --served-model-name qwen qwen3-0.6b --max-model-len 8192",
        "--model Qwen/Qwen3-0.6B --dtype bfloat16",
        "--served-model-name qwen qwen3-0.6b --max-model-len 8192",
    ),
    "Device": ("--device cpu --cpu-threads 8",),
    "Ranks of a replica": (
        "--tensor-parallel-size 2 --rank 1 --replica-id r0 --master 10.0.0.1:29500",
        "--tensor-parallel-size 2",
    ),
    "LoRA adapters": (
        "--enable-lora --max-lora-rank 32 --lora-modules sql=/adapters/sql",
        "--enable-lora --max-lora-rank 32",
        "--lora-modules sql=/adapters/sql chat=/adapters/chat",
    ),
    "Batching": ("--max-num-seqs 32 --max-num-batched-tokens 512",),
    "KV memory": ("--kv-memory 8 --no-enable-prefix-caching", "--kv-memory 8", "--num-blocks 4096"),
    "Compilation": ("-O 2 --compile-cache-root /cache/compiled",),
    "Pooling models": ("--pool-batch-sizes 1,4 --pool-prompt-lens 4096,1024",),
    "Structured output": ("--grammar-threads 4 --grammar-time-s 10",),
    "Waiting requests": ("--max-waiting-requests 256 --tenant-weights paid=4,trial=0.5",),
    "HTTP API": ("--tool-call-parser hermes --chat-template /models/chat.jinja --max-logprobs 5",),
    "Keys, TLS and browsers": ("--api-key-file /etc/triptych/keys.yaml --ssl-certfile /tls/tls.pem",),
    "Addresses": (
        "--host 0.0.0.0 --port 8000 --root-path /llm",
        "--host 0.0.0.0 --port 50061 --scheduler-address scheduler:50051",
        "--host 0.0.0.0 --port 50051",
    ),
    "Security between services": (
        "--grpc-tls-ca /tls/ca.pem --grpc-tls-cert /tls/tls.pem --grpc-tls-key /tls/tls.key",
    ),
    "Timeouts and shutdown": ("--queue-timeout-s 60", "--park-timeout-s 10", "--stall-timeout-s 30"),
    "Logging and statistics": (
        "--log-level debug --log-format console",
        "--log-level debug --state-dir /var/lib/triptych",
        "--log-level debug",
    ),
    "Launcher": ("--workers 2 --gateways 2 --run-dir /run/triptych", "--standby-workers 2"),
}


def example(heading: str, flags: Collection[str]) -> str | None:
    """Returns the first example for a heading that needs no other flags than these."""
    for text in _EXAMPLES.get(heading, ()):
        if all(word in flags for word in text.split() if word.startswith("-")):
            return text
    return None
