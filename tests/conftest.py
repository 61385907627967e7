"""Without a GPU, Triton's kernels run in its interpreter, which Triton has to be asked for before it is imported, whoever does that."""

import os
import sys
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Where `make` installs it; see deploy/locks/interpreter.txt.
    sys.path.append(str(Path(sys.prefix) / "interpreter"))
