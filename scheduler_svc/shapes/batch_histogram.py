"""Rows of decode steps and tokens of prefill steps: counted in memory, logged, kept on disk across restarts.

`triptych plan` reads the file and proposes buckets that fit the traffic.
"""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from structlog.typing import FilteringBoundLogger

from protos.service import private_files
from scheduler_svc.shapes.buckets import usage_of
from scheduler_svc.shapes.shape_config import ShapeConfig

_VERSION = 1
# Seconds between two writes of the file while nothing is logged.
_SAVE_S = 60.0


def histogram_path(state_dir: Path) -> Path:
    """Returns the file in which a scheduler with that state folder keeps its histogram."""
    return state_dir / "batch_sizes.json"


class DamagedHistogram(ValueError):  # noqa: N818 - named like the errors of `protos`
    """The file is not a histogram of this version; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class RecordedBatches:
    """Content of the file."""

    model: str = ""
    """Served name of the model that the steps ran."""
    buckets: tuple[int, ...] = ()
    """Decode buckets at the last save, ascending; empty if no replica was ready."""
    counts: Mapping[int, int] = field(default_factory=dict)
    """Maps the number of rows of a decode step to the number of such steps."""
    prefill_buckets: tuple[int, ...] = ()
    """Prefill buckets at the last save, ascending."""
    chunk_counts: Mapping[int, int] = field(default_factory=dict)
    """Maps the number of tokens of a prefill step to the number of such steps."""
    block_size: int = 1
    """Tokens of a KV block at the last save."""

    @property
    def num_steps(self) -> int:
        """Decode steps recorded."""
        return sum(self.counts.values())

    @classmethod
    def read(cls, path: Path) -> "RecordedBatches":
        """Reads a file; `DamagedHistogram` if it is none, or `OSError`."""
        try:
            data = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise DamagedHistogram("not JSON") from error
        if not isinstance(data, dict) or data.get("version") != _VERSION:
            raise DamagedHistogram(f"not version {_VERSION} of the format")
        model, prefill = (
            data.get("model"),
            data.get("prefill", {"buckets": [], "counts": {}, "block_size": 1}),
        )
        if not (isinstance(model, str) and isinstance(prefill, dict)):
            raise DamagedHistogram("a field is missing")
        if not _is_count(block_size := prefill.get("block_size", 0)):
            raise DamagedHistogram("the block size is not a positive number")
        return cls(model, *_usage(data), *_usage(prefill), block_size)

    def write(self, path: Path) -> None:
        """Replaces the file atomically: a reader sees the old or the new file."""
        prefill = _fields(self.prefill_buckets, self.chunk_counts) | {"block_size": self.block_size}
        data = {
            "version": _VERSION,
            "model": self.model,
            **_fields(self.buckets, self.counts),
            "prefill": prefill,
        }
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            private_files.write_text(temporary, json.dumps(data) + "\n")
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

        `interval_s` is the time between two log lines. None or a value that is not positive disables them;
        the file is then written once a minute.

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
        # By number of rows: steps of this process, and those already logged.
        self._counts = [0] * 257
        self._logged = [0] * 257
        self._chunks: Counter[int] = Counter()
        self._can_write = True
        self._before = self._read()
        self._model = self._before.model

    @property
    def counts(self) -> dict[int, int]:
        """Steps by number of rows, of this process and of earlier runs of the same model."""
        counts = dict(self._before.counts)
        for rows, steps in enumerate(self._counts):
            if steps:
                counts[rows] = counts.get(rows, 0) + steps
        return dict(sorted(counts.items()))

    @property
    def counts_since_start(self) -> dict[int, int]:
        """Steps by number of rows, of this process alone; they never fall."""
        return {rows: steps for rows, steps in enumerate(self._counts) if steps}

    def observe(self, num_rows: int) -> None:
        """Counts a decode step with ``num_rows`` rows (at least 1), before padding."""
        try:
            self._counts[num_rows] += 1
        except IndexError:
            self._counts.extend([0] * (num_rows + 1 - len(self._counts)))
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
        """Writes the file if anything was counted. Call it at shutdown, too."""
        if self._path is None or not (any(self._counts) or self._chunks):
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
        self._logged.extend([0] * (len(self._counts) - len(self._logged)))
        new = {
            rows: total - logged
            for rows, (total, logged) in enumerate(zip(self._counts, self._logged, strict=True))
            if total > logged
        }
        self._logged = list(self._counts)
        if not new:
            return
        steps = sum(new.values())
        fields: dict[str, Any] = {
            "mean_rows": round(sum(rows * count for rows, count in new.items()) / steps, 2)
        }
        buckets = self._shapes.buckets if self._shapes else (0,)
        if max(new) <= buckets[-1]:
            fields["padding_share"] = round(usage_of(new, buckets).padding_share, 4)
        counts = {str(rows): count for rows, count in new.items()}
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


def _fields(buckets: Sequence[int], counts: Mapping[int, int]) -> dict[str, Any]:
    return {"buckets": list(buckets), "counts": {str(size): counts[size] for size in sorted(counts)}}


def _usage(data: dict[str, Any]) -> tuple[tuple[int, ...], dict[int, int]]:
    """Returns buckets and counts of a file's part; raises `DamagedHistogram`."""
    buckets, counts = data.get("buckets"), data.get("counts")
    if not (isinstance(buckets, list) and isinstance(counts, dict)):
        raise DamagedHistogram("a field is missing")
    sizes = {int(size): steps for size, steps in counts.items() if size.isdecimal() and len(size) < 10}
    if len(sizes) != len(counts) or not all(map(_is_count, [*buckets, *sizes, *sizes.values()])):
        raise DamagedHistogram("a count is not a positive number")
    if buckets != sorted(set(buckets)):
        raise DamagedHistogram("the buckets do not ascend")
    return tuple(buckets), sizes


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
