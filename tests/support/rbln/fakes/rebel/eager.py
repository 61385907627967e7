"""Refuses operators outside of graphs. The vendor's own compute small tensors on the host, without a word."""

from typing import Any, Final

import torch

# Memory, views and copies.
_ALLOWED: Final = (
    "_copy_from", "_foreach_copy", "_local_scalar_dense", "_reshape_alias", "_to_copy", "_unsafe_view", "alias", "as_strided",
    "clone", "copy_", "detach", "empty", "is_pinned", "pin_memory", "record_stream", "resize_", "set_", "unfold", "view",
)  # fmt: skip
_LIBRARIES: list[torch.library.Library] = []


def forbid() -> None:
    """Replaces the vendor's kernels of device "rbln", except for memory, views and copies."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        namespace, _, operator = name.partition("::")
        if namespace == "aten" and not operator.startswith(_ALLOWED):
            library.impl(operator, _refusal(name), "PrivateUse1", allow_override=True)  # type: ignore[no-untyped-call]
    _LIBRARIES.append(library)


def _refusal(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"rebel: {name} ran outside of a graph")

    return refuse
