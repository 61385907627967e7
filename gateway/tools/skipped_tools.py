"""Notices of unserved tools: those other than functions."""

from collections.abc import Iterable
from typing import Final

from protos.logs import get_logger

SKIPPED_TOOLS: Final = "x-skipped-tools"

# Types that are named. Proxies refuse answers with long headers.
_MAX_NAMED: Final = 16


def skipped_tools_header(types: Iterable[str]) -> dict[str, str]:
    """Returns the header that names the types of skipped tools, each once; logs them, too."""
    if not (skipped := list(dict.fromkeys(types))):
        return {}
    if (more := len(skipped) - _MAX_NAMED) > 0:
        skipped[_MAX_NAMED:] = [f"and {more} more"]
    get_logger().info("the request has tools that are not served", skipped=skipped)
    return {SKIPPED_TOOLS: ", ".join(skipped)}
