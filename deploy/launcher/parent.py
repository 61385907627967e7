"""Children that never outlive the launcher, not even when it is killed."""

import ctypes
import os
import signal
import sys
from collections.abc import MutableMapping

PARENT_VARIABLE = "TRIPTYCH_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1


def die_with_launcher(environ: MutableMapping[str, str]) -> None:
    """Asks the kernel to kill this process when the launcher that started it dies (Linux; elsewhere it does nothing).

    The child asks for itself, early in its life, so that the launcher needs no code between fork and exec. The request
    survives until the next exec. Without a launcher's id in the environment nothing happens; the id is taken out of the
    environment, since it is not meant for grandchildren.

    Raises:
        SystemExit: The launcher was gone before the kernel could be asked.
    """
    launcher = environ.pop(PARENT_VARIABLE, "")
    if not launcher or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(launcher):
        raise SystemExit("the launcher is gone")
