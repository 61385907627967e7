"""The installed version of Triptych, and the fingerprint of a served model."""

import functools
import hashlib
from importlib import metadata
from typing import Final

from protos.triptych.v1 import common_pb2 as pb


def _version() -> str:
    try:
        return metadata.version("triptych")
    except metadata.PackageNotFoundError:
        return "0+unknown"


VERSION: Final = _version()


def fingerprint(model: pb.ModelInfo) -> str:
    """Returns OpenAI's ``system_fingerprint``: it changes with what may change answers, except parameters."""
    return _fingerprint(
        VERSION, model.source, model.architecture, model.dtype, model.max_model_len, model.tokenizer_sha256
    )


@functools.cache
def _fingerprint(*facts: object) -> str:
    return f"fp_{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"
