"""The command of a standby: `python -m deploy.launcher.standby_worker FLAGS`. Only a launcher runs it."""

import os
import sys

from deploy.launcher.parent import die_with_launcher

if __name__ == "__main__":
    die_with_launcher(os.environ)
    # Imported late, so that the kernel knows the launcher first.
    from worker_svc.standby import main

    sys.exit(main())
