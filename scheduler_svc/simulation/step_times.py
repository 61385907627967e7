"""How long a worker's steps take: a formula, or a table of measured graphs."""

import json
import urllib.request
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Self

from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protos.errors import ConfigurationRefused

_Table = dict[Annotated[int, Field(ge=1)], Annotated[float, Field(gt=0)]]


class StepTimes(BaseModel):
    """Step times of a model on a device, and what else a simulation needs to know about the worker.

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
        path = Path(source)
        profile = files(__package__) / "profiles" / f"{source}.json"
        try:
            text = profile.read_text() if profile.is_file() else path.read_text()
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
        """Writes a file that :meth:`read` reads."""
        path.write_text(json.dumps(self.model_dump(exclude_defaults=True), indent=2) + "\n")

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


def learn(url: str) -> StepTimes:
    """Returns the mean step times and the sizes of a running stack, from its ``/metrics``.

    Raises:
        ConfigurationRefused: there are no metrics at the address, or nothing has run yet.
    """
    address = url.rstrip("/").removesuffix("/metrics") + "/metrics"
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:  # noqa: S310 - the user's own address
            families = list(text_string_to_metric_families(answer.read().decode()))
    except (OSError, ValueError) as error:
        raise ConfigurationRefused(f"--learn {url}: {getattr(error, 'reason', error)}") from error
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    counts: defaultdict[tuple[str, str], float] = defaultdict(float)
    memory: dict[str, str] = {}
    for sample in (sample for family in families for sample in family.samples):
        key = (sample.labels.get("kind", ""), sample.labels.get("bucket", ""))
        if sample.name == "triptych:step_seconds_sum":
            sums[key] += sample.value
        elif sample.name == "triptych:step_seconds_count":
            counts[key] += sample.value
        elif sample.name == "vllm:cache_config_info":
            memory = sample.labels
    tables: dict[str, dict[int, float]] = {"prefill": {}, "decode": {}}
    for (kind, bucket), count in counts.items():
        if count and kind in tables:
            tables[kind][int(bucket)] = sums[kind, bucket] / count
    if not all(tables.values()) or not memory:
        raise ConfigurationRefused(
            f"--learn {url}: no step has run yet; send it requests like those to simulate, and try again"
        )
    block_size = int(memory["block_size"])
    buckets = [int(bucket) for kind, bucket in counts if kind == "decode"]
    return StepTimes(
        chunk_s=tables["prefill"], decode_s=tables["decode"], max_num_seqs=max(buckets),
        max_num_batched_tokens=max(tables["prefill"]), block_size=block_size,
        kv_tokens=int(memory["num_gpu_blocks"]) * block_size,
        measured=f"learned from {url}, {datetime.now(UTC):%Y-%m-%d}",
    )  # fmt: skip
