"""The names of adapters: what a request for one is told."""

import pytest

from protos.errors import NotFound, Unavailable, Unsupported
from scheduler_svc.adapters.registry import AdapterRegistry


def test_an_expected_adapter_that_is_tried_again_is_not_refused() -> None:
    """Its requests are told to retry once workers that run adapters have joined."""
    registry = AdapterRegistry(["sql"])
    with pytest.raises(Unavailable, match="is not loaded yet; retry"):
        registry.resolve("sql")
    registry.refuse("sql", Unsupported("the workers run no LoRA adapters"), for_good=False)
    with pytest.raises(NotFound, match="was refused: the workers run no LoRA adapters"):
        registry.resolve("sql")
    adapter = registry.begin("sql", "/adapters/sql", in_place=False, expected=True)
    with pytest.raises(Unavailable, match="is not loaded yet; retry"):
        registry.resolve("sql")
    registry.failed(adapter)
    with pytest.raises(Unavailable, match="is not loaded yet; retry"):
        registry.resolve("sql")
