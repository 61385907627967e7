"""What a service's process holds, written to a file on SIGUSR1, and what of it is a leak."""

import asyncio
import gc
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

_PAGE_MIB: Final = os.sysconf("SC_PAGE_SIZE") / (1 << 20)
_MORE: Final = {"tasks": 8, "futures": 40, "live": 0, "blocks": 0}
"""How many more an idle process may hold. Connections that are about to close have tasks and futures."""
_MORE_MEMORY: Final = 1.25
_MORE_MIB: Final = 48.0


def install(service: str, file: Path) -> None:
    """Lets SIGUSR1 write `file`. Call it before the service's own modules are used."""
    collect = _watch_scheduler() if service == "scheduler" else dict

    def write(_number: int, _frame: object) -> None:
        held = {**_process(), **collect()}
        part = file.with_suffix(".part")
        part.write_text(json.dumps(held))
        part.rename(file)

    signal.signal(signal.SIGUSR1, write)


def _process() -> dict[str, Any]:
    # Services move what they hold for life out of the collector's sight.
    gc.unfreeze()
    gc.collect()
    objects = gc.get_objects()
    waiting = [each for each in objects if isinstance(each, asyncio.Future)]
    tasks = [each for each in waiting if isinstance(each, asyncio.Task)]
    held = {
        "pid": os.getpid(),
        "tasks": sum(not task.done() for task in tasks),
        "futures": len(waiting) - len(tasks),
        "rss_mib": round(resident_mib(os.getpid()), 1),
    }
    del objects, waiting, tasks
    gc.freeze()
    return held


def resident_mib(pid: int) -> float:
    """Returns a process' resident memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_MIB


def _watch_scheduler() -> Callable[[], dict[str, Any]]:
    """Finds the engine when it is made; returns what reads it."""
    from scheduler_svc.engine.engine import Engine
    from scheduler_svc.workers import replicas

    engines: list[Engine] = []

    class WatchedEngine(Engine):
        def __init__(self, **fields: Any) -> None:
            super().__init__(**fields)
            engines.append(self)

    vars(replicas)["Engine"] = WatchedEngine

    def collect() -> dict[str, Any]:
        (engine,) = engines
        fault = ""
        try:
            for replica in engine.replicas.values():
                if replica.scheduler.kv is not None:
                    replica.scheduler.kv.check_integrity()
        except RuntimeError as error:
            fault = str(error)
        return {
            "integrity": fault,
            "live": len(engine.live()),
            "blocks": sum(
                group.pool.num_blocks - group.pool.num_free
                for kv in engine.caches().values()
                for group in kv.groups
            ),
        }  # fmt: skip

    return collect


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
