"""Rows of decode steps and tokens of prefill steps: counted, logged and kept on disk across restarts.

`triptych plan` reads the file and proposes buckets that fit the traffic.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, PositiveInt, ValidationError, field_serializer, field_validator
from structlog.typing import FilteringBoundLogger

from protos.service import private_files
from scheduler_svc.shapes.buckets import usage_of
from scheduler_svc.shapes.shape_config import ShapeConfig

# Seconds between two writes of the file while nothing is logged.
_SAVE_S = 60.0


def histogram_path(state_dir: Path) -> Path:
    """Returns the file in which a scheduler with that state folder keeps its histogram."""
    return state_dir / "batch_sizes.json"


class DamagedHistogram(ValueError):  # noqa: N818 - named like the errors of `protos`
    """The file is not a histogram of this version; the message gives the reason."""


class _Steps(BaseModel, strict=True, frozen=True):
    """A part of the file."""

    buckets: tuple[PositiveInt, ...]
    counts: dict[PositiveInt, PositiveInt]

    @field_validator("buckets")
    @classmethod
    def _ascending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if list(value) != sorted(set(value)):
            raise ValueError("the buckets do not ascend")
        return value

    @field_serializer("counts")
    def _sorted(self, value: dict[int, int]) -> dict[int, int]:
        return dict(sorted(value.items()))


class _Chunks(_Steps):
    block_size: PositiveInt


class _File(_Steps):
    version: Literal[1]
    model: str
    prefill: _Chunks = _Chunks(buckets=(), counts={}, block_size=1)


@dataclass(frozen=True, slots=True)
class RecordedBatches:
    """Content of the file."""

    model: str = ""
    """Served name of the model that the steps ran."""
    buckets: tuple[int, ...] = ()
    """Decode buckets at the last save, ascending; empty if no replica was ready."""
    counts: Mapping[int, int] = field(default_factory=dict)
    """Decode steps by number of rows."""
    prefill_buckets: tuple[int, ...] = ()
    """Prefill buckets at the last save, ascending."""
    chunk_counts: Mapping[int, int] = field(default_factory=dict)
    """Prefill steps by number of tokens."""
    block_size: int = 1
    """Tokens of a KV block at the last save."""

    @classmethod
    def read(cls, path: Path) -> "RecordedBatches":
        """Reads a file; `DamagedHistogram` if it is none, or `OSError`."""
        try:
            file = _File.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            raise DamagedHistogram(": ".join([*map(str, first["loc"]), first["msg"]])) from error
        chunks = file.prefill
        return cls(file.model, file.buckets, file.counts, chunks.buckets, chunks.counts, chunks.block_size)

    def write(self, path: Path) -> None:
        """Replaces the file atomically: a reader sees the old or the new file."""
        chunks = _Chunks(
            buckets=self.prefill_buckets, counts=dict(self.chunk_counts), block_size=self.block_size
        )
        file = _File(
            version=1, model=self.model, buckets=self.buckets, counts=dict(self.counts), prefill=chunks
        )
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            private_files.write_text(temporary, file.model_dump_json() + "\n")
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


class BatchHistogram:
    """Counts the decode steps of all replicas by their number of rows, and the prefill steps by tokens.

    Counts continue from the file, so they grow across restarts. The file of another model is renamed to end
    in ``.previous``. A file that cannot be read, parsed or written only causes a warning.
    """

    def __init__(
        self, path: Path | None, interval_s: float | None, clock: Callable[[], float], log: FilteringBoundLogger
    ) -> None:  # fmt: skip
        """Reads the counts of earlier runs from `path`; None keeps nothing.

        `interval_s` is the time between two log lines. None, zero or a negative value disables them; the file
        is then written once a minute.

        Raises:
            ConfigurationRefused: others may write to the folder.
        """
        if path is not None and path.parent.exists():
            private_files.check(path.parent, "the state dir", "choose another --state-dir")
        self._path = path
        self._interval_s = interval_s if interval_s is not None and interval_s > 0 else None
        self._clock = clock
        self._log = log
        self._due_s = clock() + (self._interval_s or _SAVE_S)
        self._shapes: ShapeConfig | None = None
        # Steps of this process by number of rows, and those already logged.
        self._counts: Counter[int] = Counter()
        self._logged: Counter[int] = Counter()
        self._chunks: Counter[int] = Counter()
        self._can_write = True
        self._before = self._read()
        self._model = self._before.model

    @property
    def counts(self) -> Mapping[int, int]:
        """Steps by number of rows, of this process and of earlier runs of the same model."""
        return self._counts + Counter(self._before.counts)

    @property
    def counts_since_start(self) -> Mapping[int, int]:
        """Steps of this process by number of rows."""
        return self._counts

    def observe(self, num_rows: int) -> None:
        """Counts a decode step with ``num_rows`` rows (at least 1), before padding."""
        self._counts[num_rows] += 1

    def observe_chunk(self, num_tokens: int) -> None:
        """Counts a prefill step with ``num_tokens`` tokens (at least 1), before padding."""
        self._chunks[num_tokens] += 1

    def describe(self, model: str, shapes: ShapeConfig) -> None:
        """Sets the model's served name and the shapes, once a replica is ready."""
        if self._before.counts and self._before.model != model:
            self._rename(".previous", f"it counts batches of {self._before.model!r}")
            self._before = RecordedBatches()
        self._model, self._shapes = model, shapes

    def tick(self) -> None:
        """Logs and saves if it is time; cheap otherwise. Call it regularly."""
        now = self._clock()
        if now < self._due_s:
            return
        self._due_s = now + (self._interval_s or _SAVE_S)
        if self._interval_s:
            self._log_interval()
        self.save()

    def save(self) -> None:
        """Writes the file if anything was counted. Also call it at shutdown."""
        if self._path is None or not (self._counts or self._chunks):
            return
        before, shapes = self._before, self._shapes
        try:
            RecordedBatches(
                self._model,
                shapes.buckets if shapes else before.buckets,
                self.counts,
                shapes.chunk_sizes if shapes else before.prefill_buckets,
                self._chunks + Counter(before.chunk_counts),
                shapes.block_size if shapes else before.block_size,
            ).write(self._path)
        except OSError as error:
            if self._can_write:
                self._log.warning("batch_sizes_not_saved", path=str(self._path), reason=error.strerror)
            self._can_write = False
        else:
            self._can_write = True

    def _log_interval(self) -> None:
        new = self._counts - self._logged
        self._logged = self._counts.copy()
        if not new:
            return
        steps = new.total()
        fields: dict[str, Any] = {
            "mean_rows": round(sum(rows * count for rows, count in new.items()) / steps, 2)
        }
        buckets = self._shapes.buckets if self._shapes else (0,)
        if max(new) <= buckets[-1]:
            fields["padding_share"] = round(usage_of(new, buckets).padding_share, 4)
        counts = {str(rows): new[rows] for rows in sorted(new)}
        self._log.info("decode_batch_sizes", steps=steps, **fields, steps_by_rows=counts)

    def _read(self) -> RecordedBatches:
        if self._path is None:
            return RecordedBatches()
        try:
            return RecordedBatches.read(self._path)
        except FileNotFoundError:
            pass
        except DamagedHistogram as error:
            self._rename(".damaged", str(error))
        except OSError as error:
            self._rename(".damaged", error.strerror or "unreadable")
        return RecordedBatches()

    def _rename(self, suffix: str, reason: str) -> None:
        if self._path is None:
            return
        aside = self._path.with_name(self._path.name + suffix)
        self._log.warning("batch_sizes_renamed", path=str(aside), reason=reason)
        # A file that is gone or cannot be renamed: the next save replaces it or reports why not.
        with contextlib.suppress(OSError):
            self._path.replace(aside)
