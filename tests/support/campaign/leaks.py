"""Compares what idle processes hold before and after a campaign."""

from collections.abc import Mapping
from typing import Any, Final

_MORE: Final = {"tasks": 8, "futures": 40, "live": 0, "blocks": 0}
"""How many more an idle process may hold. Connections that are about to close have tasks and futures."""
_MORE_MEMORY: Final = 1.25
_MORE_MIB: Final = 48.0


def leaks(before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a line for each thing that an idle service should not hold."""
    found = []
    for service, held in after.items():
        first = before[service]
        if held["rss_mib"] > _MORE_MEMORY * first["rss_mib"] + _MORE_MIB:
            found.append(f"{service} has {held['rss_mib']} MiB, {first['rss_mib']} before")
        if held.get("integrity"):
            found.append(f"{service}: {held['integrity']}")
        found += [
            f"{service} holds {held[name]} {name}, {first[name]} before"
            for name, more in _MORE.items()
            if held.get(name, 0) > first.get(name, 0) + more
        ]
    return found
