"""Fields that routes add to a request's line in the access log."""

from collections.abc import MutableMapping
from typing import Any, Final

_KEY: Final = "triptych.access"


def note(scope: MutableMapping[str, Any], **fields: Any) -> None:
    """Adds ``fields`` to the request's line in the access log; skips ``None`` values."""
    noted = scope.setdefault(_KEY, {})
    noted.update({name: value for name, value in fields.items() if value is not None})


def noted_fields(scope: MutableMapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that :func:`note` has added so far."""
    fields: dict[str, Any] = scope.get(_KEY, {})
    return fields
