"""The flags of earlier releases of vLLM, which unit files and recipes still have."""

from typing import Final

from deploy.vllm_flags import conversions
from deploy.vllm_flags.flag import VllmFlag, mapped, moot, refused

_HOST_MEMORY = "nothing is swapped to the host's memory"
_ONE_ENGINE = "vLLM has removed it, too"
_TURNS = "see --decode-steps-per-chunk"
_CONFIG = "is not supported; edit config.json in a copy of the model's folder"

OLDER: Final[tuple[VllmFlag, ...]] = (
    *mapped(
        "--task",
        "--pooling-task",
        "follows the model: a pooling model pools, every other model generates; embed and classify are pooling tasks",
        convert=conversions.task,
    ),
    *moot("requests are logged with --enable-log-requests alone", "--disable-log-requests", form="switch"),
    *moot("--reasoning-parser turns it on", "--enable-reasoning", form="switch"),
    *moot("xgrammar compiles every grammar", "--guided-decoding-backend"),
    *moot("xgrammar compiles every grammar", "--guided-decoding-disable-fallback", form="switch"),
    *moot(_HOST_MEMORY, "--swap-space", "--preemption-mode"),
    *moot(
        _TURNS,
        "--num-scheduler-steps",
        "--max-num-partial-prefills",
        "--max-long-partial-prefills",
        "--scheduler-delay-factor",
    ),
    *moot(
        "there is no speculative decoding; answers are the same without",
        "--speculative-model",
        "--num-speculative-tokens",
        "--num-lookahead-slots",
    ),
    *moot(
        _ONE_ENGINE,
        "--use-v2-block-manager",
        "--disable-async-output-proc",
        "--multi-step-stream-outputs",
        "--disable-frontend-multiprocessing",
        "--worker-use-ray",
        "--engine-use-ray",
        form="switch",
    ),
    *moot("graphs exist for the decode buckets; see --decode-buckets", "--cuda-graph-sizes", form="values"),
    *moot(
        "graphs exist for the decode buckets; see --decode-buckets",
        "--max-seq-len-to-capture",
        "--max-context-len-to-capture",
    ),
    *moot("KV caches have the model's type", "--calculate-kv-scales", form="switch"),
    *moot(
        "the gateway has two threads for long texts; add --gateways",
        "--tokenizer-pool-size",
        "--tokenizer-pool-type",
        "--tokenizer-pool-extra-config",
    ),
    *moot("models read text alone", "--disable-mm-preprocessor-cache", form="switch"),
    *refused(_CONFIG, "--rope-scaling", harmless=("{}",)),
    *refused(_CONFIG, "--rope-theta"),
    *refused(
        "is not supported; see --pooling-task and the request's parameters",
        "--override-pooler-config",
        harmless=("{}",),
    ),
)
"""Each flag that vLLM no longer has, once."""
