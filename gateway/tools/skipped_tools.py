"""Notices of tools that a request offers and that are not served, because they are not functions."""

from collections.abc import Iterable
from typing import Final

from protos.logs import get_logger

SKIPPED_TOOLS: Final = "x-skipped-tools"


def skipped_tools_header(types: Iterable[str]) -> dict[str, str]:
    """Returns the header that names the types of skipped tools, each once; logs them, too."""
    if not (skipped := list(dict.fromkeys(types))):
        return {}
    get_logger().info("the request has tools that are not served", skipped=skipped)
    return {SKIPPED_TOOLS: ", ".join(skipped)}
