"""The worker's command: reads its settings, serves, and says in one line what is wrong with them."""

import asyncio
import os
import sys
import threading

from protos.errors import ConfigurationRefused
from protos.logs import configure
from protos.settings import load
from worker_svc.api.model_thread import MODEL_THREAD
from worker_svc.log_silencing import quiet_libraries
from worker_svc.settings import Settings


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0 after a clean stop, 2 for a bad setting."""
    try:
        settings = load(Settings, argv)
        configure("worker", level=settings.log_level, log_format=settings.log_format)
        quiet_libraries()
        # Threads that have nothing to do leave the processor to the gateway and the scheduler, which are waiting for it just then.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # Only now: a mistake in a flag is told without the seconds that importing torch takes.
        from worker_svc.service import serve

        asyncio.run(serve(settings))
        code = 0
    except ConfigurationRefused as error:
        print(f"triptych worker: {error.message}", file=sys.stderr)
        code = 2
    if any(thread.name == MODEL_THREAD for thread in threading.enumerate()):
        # It is in the midst of an import or of loading. The interpreter's own ending would tear torch down under it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
