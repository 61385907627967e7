"""The operator with which the vendor's compiler finds the most probable token of each row."""

from typing import Any, Final

import torch

NAMESPACE: Final = "rbln"
OPERATOR: Final = "argmax"
# Keeps the operator registered.
_LIBRARIES: list[torch.library.Library] = []


def emit_argmax(logits: torch.Tensor) -> torch.Tensor:
    """Calls the operator on logits [rows, vocab]. Returns token ids [rows]."""
    operators: Any = torch.ops.rbln
    tokens: torch.Tensor = operators.argmax(logits)
    return tokens


def register() -> None:
    """Registers a reference and a fake, unless the vendor has registered the operator."""
    if hasattr(torch.ops.rbln, OPERATOR):
        return
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(f"{OPERATOR}(Tensor logits) -> Tensor")
    library.impl(OPERATOR, lambda logits: logits.argmax(dim=-1), "CPU")
    torch.library.register_fake(
        f"{NAMESPACE}::{OPERATOR}",
        lambda logits: logits.new_empty(logits.shape[:-1], dtype=torch.int64),
        lib=library,
        allow_override=False,
    )
    _LIBRARIES.append(library)
