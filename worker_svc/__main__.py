"""The worker's command: reads the settings and serves; a bad setting ends it with a line of text."""

import os
import sys
import threading
from typing import NoReturn

import uvloop

from protos.errors import ConfigurationRefused, print_end
from protos.service.environment import check_for_service
from protos.service.logs import configure
from protos.service.settings import load
from worker_svc.api.model_thread import MODEL_THREAD
from worker_svc.api.watchdog import EXIT_CODE, WorkerFailed
from worker_svc.settings import Settings
from worker_svc.vllm_platform import PLATFORM_VARIABLE, prepare_libraries

# Beginnings of the names of threads that may be in torch when the process ends. The last two wait for other
# ranks.
_TORCH_THREADS = (MODEL_THREAD, "adapters", "rank-plans", "rank-results")


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns 0 after a clean stop, 1 if the worker cannot go on, 2 for a bad setting."""
    try:
        settings = load(Settings, argv)
        configure("worker", level=settings.log_level, log_format=settings.log_format)
        if PLATFORM_VARIABLE not in os.environ:  # a standby has set some of vLLM's variables itself
            check_for_service(os.environ)
        prepare_process()
        # Imported late, so that a bad flag is reported before torch takes seconds to import.
        from worker_svc.service import serve

    except ConfigurationRefused as error:
        print_end("worker", error)
        return 2
    try:
        uvloop.run(serve(settings, _end))
    except (ConfigurationRefused, WorkerFailed) as error:
        _end(error)
    if _uses_torch():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


def _end(error: ConfigurationRefused | WorkerFailed) -> NoReturn:
    """Prints the reason and ends the process at once: a broken device may block a normal exit."""
    print_end("worker", error)
    os._exit(2 if isinstance(error, ConfigurationRefused) else EXIT_CODE)


def _uses_torch() -> bool:
    """Whether threads may still be in torch: a normal exit would destroy its state under them, and abort."""
    distributed = sys.modules.get("torch.distributed")
    return any(thread.name.startswith(_TORCH_THREADS) for thread in threading.enumerate()) or (
        distributed is not None and distributed.is_available() and distributed.is_initialized()
    )


def prepare_process() -> None:
    """Silences libraries and sets variables for them. Call it before torch and vLLM are imported."""
    prepare_libraries()
    # Idle threads must not spin: the gateway and the scheduler need the processor between steps.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


if __name__ == "__main__":
    sys.exit(main())
