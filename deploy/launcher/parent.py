"""Ends a child process when its launcher dies, even if the launcher is killed."""

import ctypes
import os
import signal
import sys
from collections.abc import MutableMapping

PARENT_VARIABLE = "TRIPTYCH_LAUNCHER_PID"
"""The environment variable that tells a child its launcher's process id."""
_PR_SET_PDEATHSIG = 1


def die_with_launcher(environ: MutableMapping[str, str]) -> None:
    """Asks the kernel to kill this process when its launcher dies.

    Does nothing without a launcher, or off Linux.  The child makes this request itself, soon after its
    start, so the launcher runs no code between fork and exec. The request holds until the next exec. The
    function removes the launcher's id from `environ`, because the child's own children must not use it.
    Raises: SystemExit: The launcher died before the kernel knew of the request.
    """
    launcher = environ.pop(PARENT_VARIABLE, "")
    if not launcher or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(launcher):
        raise SystemExit("the launcher is gone")
