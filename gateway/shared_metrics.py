"""Metrics of several gateways of one machine, which share a port: any of them answers for all.

Each process listens on a Unix socket in a folder that they share, and writes its own metrics to whoever
connects. A scrape reads all sockets and adds up what it finds. Files in shared memory, as prometheus_client
has them for forked servers, would make each token's observation a write to a mapped file.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from protos.errors import ConfigurationRefused
from protos.logs import get_logger

_TIMEOUT_S: Final = 2.0
# Ends a text. Part of one, from a gateway that dies or stalls, would add up to wrong figures.
_END: Final = b"# EOF\n"

# Figures of a process mean nothing when they are added up. They are on its own --metrics-port.
_OF_ONE_PROCESS: Final = ("process_", "python_")
# Gauges that say yes or no: the largest value counts.
_FLAGS: Final = frozenset({"triptych:gateway_scheduler_up"})


class SharedMetrics:
    """One gateway's part in the metrics of all."""

    def __init__(self, folder: Path, own_text: Callable[[], bytes]) -> None:
        """Prepares the part; :meth:`start` makes it readable.

        Args:
            folder: where the gateways have their sockets; made if missing.
            own_text: returns this process's metrics in Prometheus' text format.
        """
        self._folder = folder
        self._own_text = own_text
        self._path = folder / f"{uuid.uuid4().hex[:12]}.sock"
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listens for the other gateways.

        Raises:
            ConfigurationRefused: if there can be no socket in the folder.
        """
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._answer, self._path)
        except OSError as error:
            raise ConfigurationRefused(
                f"--metrics-folder {self._folder}: {error.strerror or error}; choose another folder"
            ) from error

    async def close(self) -> None:
        """Stops listening and removes the socket."""
        if self._server is not None:
            self._server.close()
        self._path.unlink(missing_ok=True)

    async def text(self) -> bytes:
        """Returns the sum of all gateways' metrics, with the number of those that answered in time."""
        paths = [path for path in sorted(self._folder.glob("*.sock")) if path != self._path]
        found = await asyncio.gather(*map(_read, paths))
        texts = [self._own_text(), *(text for text in found if text is not None)]
        return await asyncio.to_thread(merged, texts)

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_TIMEOUT_S):
                writer.write(self._own_text() + _END)
                await writer.drain()
        writer.close()


async def _read(path: Path) -> bytes | None:
    """Returns the metrics of the gateway behind a socket; None if it does not answer."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                text = await reader.read()
            finally:
                writer.close()
        if text.endswith(_END):
            return text
        get_logger().warning("a gateway's metrics are missing", socket=str(path), error="cut short")
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)  # noqa: ASYNC240 - quick; its process has died
    except FileNotFoundError:
        pass  # its process has just ended
    except (OSError, TimeoutError) as error:
        get_logger().warning("a gateway's metrics are missing", socket=str(path), error=str(error))
    return None


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def merged(texts: Iterable[bytes]) -> bytes:
    """Returns the sum of metrics in Prometheus' text format, sample by sample.

    Args:
        texts: the metrics of each process.
    """
    values: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = {}
    families: dict[str, Metric] = {}
    count = 0
    for count, text in enumerate(texts, start=1):  # noqa: B007 - the last count is the number of processes
        for family in text_string_to_metric_families(text.decode()):
            if family.name.startswith(_OF_ONE_PROCESS):
                continue
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                key = (family.name, sample.name, tuple(sorted(sample.labels.items())))
                before = values.get(key)
                if before is None:
                    values[key] = sample.value
                elif family.name in _FLAGS or sample.name.endswith("_created"):
                    values[key] = max(before, sample.value)
                else:
                    values[key] = before + sample.value
    for (name, sample_name, labels), value in values.items():
        families[name].add_sample(sample_name, dict(labels), value)
    processes = Metric("triptych:gateway_processes", "Gateways whose metrics these are the sum of.", "gauge")
    processes.add_sample(processes.name, {}, count)
    return generate_latest(_Families([*families.values(), processes]))
