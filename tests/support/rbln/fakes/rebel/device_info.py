"""Facts about the NPU."""

import os


def get_npu_name(device_id: int = 0) -> str | None:
    """Returns the name of an NPU, or None without one."""
    return None if device_id else os.environ.get("STUB_RBLN_NPU", "RBLN-CA25") or None
