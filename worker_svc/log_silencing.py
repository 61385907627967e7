"""Keeps the informational output of third-party libraries out of the worker's log."""

import logging
import os
import warnings


def silence_libraries() -> None:
    """Silences libraries except for errors. Call it before vLLM and transformers are imported."""
    for name in ("vllm", "transformers", "torch", "torch._library.triton", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", module=r"(vllm|transformers|torch)\b")
