"""How long a worker's steps take: a formula, or a table of measured graphs."""

import json
import re
import urllib.request
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPException
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final, Self

from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protos.errors import ConfigurationRefused
from scheduler_svc.kv.cache import ChunkStarts

_MOST_METRICS: Final = 16 << 20
"""Bytes: metrics of hundreds of replicas."""

_Table = dict[Annotated[int, Field(ge=1)], Annotated[float, Field(gt=0)]]


class StepTimes(BaseModel):
    """Step times of a model on a device, and the worker's sizes that a simulation needs.

    A step takes ``base_s + max(floor_s, per_token_s * tokens)``, where padding counts as tokens. Measured
    graphs in ``chunk_s`` and ``decode_s`` come before the formula.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_s: float = Field(0.0, ge=0)
    """Part of every step, such as launching it and reading its tokens."""
    floor_s: float = Field(0.0, ge=0)
    """Least time of the computation: weights are read once, however few tokens there are."""
    per_token_s: float = Field(0.0, ge=0)
    chunk_s: _Table = Field(default_factory=dict)
    """Measured prefill steps: seconds by the tokens of the compiled chunk."""
    decode_s: _Table = Field(default_factory=dict)
    """Measured decode steps: seconds by the rows of the compiled batch."""

    max_num_seqs: int = Field(64, ge=1)
    """The worker's own default of the setting; so are the next two."""
    max_num_batched_tokens: int = Field(512, ge=1)
    block_size: int = Field(128, ge=1)
    chunk_starts: ChunkStarts = "anywhere"
    """Where prefill chunks may begin, and so where prefix hits end: "exact" on CPUs with our kernels."""
    kv_tokens: int = Field(1 << 20, ge=1)
    """Tokens of KV memory on each replica, unless ``--blocks`` says otherwise."""

    measured: str = ""
    """The model, machine, day and command of the measurement."""

    @classmethod
    def read(cls, source: str) -> Self:
        """Reads a file, or a profile that comes with Triptych.

        Raises:
            ConfigurationRefused: there is no such file or profile, or it holds no step times.
        """
        profile = files(__package__) / "profiles" / f"{source}.json"
        try:
            text = (profile if source in profiles() else Path(source)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text file"
            raise ConfigurationRefused(
                f"--step-times {source}: {reason}; name a file or one of {', '.join(profiles())}"
            ) from error
        try:
            times = cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigurationRefused(
                f"--step-times {source}: {f'{where}: ' if where else ''}{first['msg']}"
            ) from error
        if not (times.floor_s + times.per_token_s + times.base_s or (times.chunk_s and times.decode_s)):
            raise ConfigurationRefused(
                f"--step-times {source}: steps take no time; give base_s, floor_s or per_token_s, or both chunk_s and decode_s"
            )
        return times

    def write(self, path: Path) -> None:
        """Writes a file that :meth:`read` reads.

        Raises:
            ConfigurationRefused: it cannot be written.
        """
        try:
            path.write_text(
                json.dumps(self.model_dump(exclude_defaults=True), indent=2) + "\n", encoding="utf-8"
            )
        except OSError as error:
            raise ConfigurationRefused(f"--step-times {path}: {error.strerror}") from error

    def chunk(self, tokens: int) -> float:
        """Returns the seconds of a prefill step of this many tokens, padding included."""
        return _looked_up(self.chunk_s, tokens) if self.chunk_s else self._formula(tokens)

    def decode(self, rows: int) -> float:
        """Returns the seconds of a decode step of this many rows, padding included."""
        return _looked_up(self.decode_s, rows) if self.decode_s else self._formula(rows)

    def _formula(self, tokens: int) -> float:
        return self.base_s + max(self.floor_s, self.per_token_s * tokens)


def profiles() -> list[str]:
    """Returns the names of the profiles that come with Triptych."""
    folder = files(__package__) / "profiles"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir())


def _looked_up(table: Mapping[int, float], size: int) -> float:
    """Returns the time of a size: measured, or on the line through its neighbours."""
    if size in table:
        return table[size]
    sizes = sorted(table)
    if len(sizes) == 1:
        return table[sizes[0]] * max(1.0, size / sizes[0])
    index = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
    low, high = sizes[index - 1], sizes[index]
    slope = (table[high] - table[low]) / (high - low)
    return max(table[low] + slope * (size - low), min(table.values()) / 2)


@dataclass(frozen=True, slots=True)
class ObservedSteps:
    """Steps of a running stack since its start."""

    seconds: Mapping[tuple[str, int], float]
    """Time of all steps, by kind and size of their graph."""
    counts: Mapping[tuple[str, int], float]
    """Number of steps, likewise."""
    block_size: int
    num_blocks: int

    @classmethod
    def read(cls, url: str) -> Self:
        """Reads the ``/metrics`` of a gateway, over all replicas.

        Raises:
            ConfigurationRefused: there are no metrics of a stack at the address.
        """
        if not re.match("https?://", url, re.IGNORECASE):
            raise ConfigurationRefused(f"--learn {url}: must be a URL such as http://127.0.0.1:8000")
        address = url.rstrip("/").removesuffix("/metrics") + "/metrics"
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:  # noqa: S310 - only HTTP
                text = answer.read(_MOST_METRICS + 1)
        except HTTPException as error:
            raise ConfigurationRefused(
                f"--learn {url}: no valid HTTP answer ({type(error).__name__})"
            ) from error
        except (OSError, ValueError) as error:
            raise ConfigurationRefused(f"--learn {url}: {getattr(error, 'reason', error)}") from error
        if len(text) > _MOST_METRICS:
            raise ConfigurationRefused(f"--learn {url}: more than {_MOST_METRICS >> 20} MiB of metrics")
        try:
            return cls._parsed(url, text.decode())
        except (LookupError, ValueError) as error:
            raise ConfigurationRefused(f"--learn {url}: its /metrics are not those of Triptych") from error

    @classmethod
    def _parsed(cls, url: str, text: str) -> Self:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        seconds: defaultdict[tuple[str, int], float] = defaultdict(float)
        counts: defaultdict[tuple[str, int], float] = defaultdict(float)
        sums = {"triptych:step_seconds_sum": seconds, "triptych:step_seconds_count": counts}
        memory = next((one.labels for one in samples if one.name == "vllm:cache_config_info"), None)
        if memory is None:
            raise ConfigurationRefused(f"--learn {url}: no replica of a generating model is ready there")
        for sample in samples:
            if sample.name in sums and sample.labels["kind"] in ("prefill", "decode"):
                sums[sample.name][sample.labels["kind"], int(sample.labels["bucket"])] += sample.value
        return cls(seconds, counts, int(memory["block_size"]), int(memory["num_gpu_blocks"]))


def learn(url: str, *, since: ObservedSteps | None = None) -> StepTimes:
    """Returns the mean step times and the sizes of a running stack.

    Args:
        url: the gateway's.
        since: leaves out the steps of this earlier time.

    Raises:
        ConfigurationRefused: there is no stack at the address, or nothing has run yet.
    """
    steps = ObservedSteps.read(url)
    tables: dict[str, dict[int, float]] = {"prefill": {}, "decode": {}}
    for graph, count in steps.counts.items():
        new = count - (since.counts.get(graph, 0.0) if since else 0.0)
        if new:
            seconds = steps.seconds[graph] - (since.seconds.get(graph, 0.0) if since else 0.0)
            tables[graph[0]][graph[1]] = seconds / new
    if not all(tables.values()):
        raise ConfigurationRefused(
            f"--learn {url}: no step has run yet; send it requests like those to simulate, and try again"
        )
    try:
        return _learned(url, steps, tables)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigurationRefused(f"--learn {url}: {where}: {first['msg']}") from error


def _learned(url: str, steps: ObservedSteps, tables: Mapping[str, dict[int, float]]) -> StepTimes:
    return StepTimes(
        chunk_s=tables["prefill"], decode_s=tables["decode"],
        max_num_seqs=max(size for kind, size in steps.counts if kind == "decode"),
        max_num_batched_tokens=max(size for kind, size in steps.counts if kind == "prefill"),
        block_size=steps.block_size, kv_tokens=steps.num_blocks * steps.block_size,
        measured=f"learned from {url}, {datetime.now(UTC):%Y-%m-%d}",
    )  # fmt: skip
