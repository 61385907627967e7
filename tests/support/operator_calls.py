"""Calls of operators as PyTorch's dispatcher gets them."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the calls of the operators of some namespaces, with copies of their tensors."""

    def __init__(self, *namespaces: str) -> None:
        """Records nothing yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._namespaces = namespaces
        self.calls: list[tuple[str, list[Any]]] = []
        """Each call's "namespace::operator" and arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator."""
        if func.namespace in self._namespaces:
            assert not kwargs
            copies = [each.clone() if isinstance(each, torch.Tensor) else each for each in args]
            self.calls.append((func._schema.name, copies))
        return func(*args, **kwargs or {})
