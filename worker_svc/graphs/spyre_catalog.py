"""The catalog file of vLLM-Spyre, in which deployments list the configurations that they precompiled.

It lies in the folder of the compile cache. Its entries only warn: the cache decides which code is used.
"""

import contextlib
import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from protos.service import private_files
from worker_svc.shapes import ShapeConfig

NAME: Final = "pre_compiled_cache_catalog.json"
_MODEL: Final = "MODEL_NAME"
# Fields with a program's version. It warns about ours, and needs the field.
_VERSIONS: Final = {"vllm-spyre": "vllm_spyre_version", "sendnn-inference": "sendnn_inference_version"}
_OURS: Final = dict.fromkeys(_VERSIONS.values(), "triptych")
# Entries with these are for static batches, which generating models do not have here.
_STATIC: Final = ("VLLM_SPYRE_WARMUP_PROMPT_LENS", "SENDNN_INFERENCE_WARMUP_PROMPT_LENS")


class SpyreCatalog:
    """The catalog of a folder, seen by a generating model."""

    def __init__(self, folder: Path, model: str, tensor: int, shapes: ShapeConfig) -> None:
        """Reads nothing yet. `model` is the `--model` setting, `tensor` its number of parallel ranks."""
        self._file = folder / NAME
        self._model = model
        self._sizes = {
            "NUM_AIUS": tensor,
            "VLLM_DT_MAX_CONTEXT_LEN": shapes.max_model_len,
            "VLLM_DT_MAX_BATCH_SIZE": shapes.max_num_seqs,
        }

    def warnings(self) -> list[str]:
        """Returns the differences from the most similar matching entry; none without a catalog."""
        try:
            found = [self._differences(entry) for entry in self._read() if self._matches(entry)]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return [f"{self._file} cannot be read ({type(error).__name__}: {error})"]
        sizes = ", ".join(f"{name} {value}" for name, value in self._sizes.items())
        return min(found, key=len, default=[f"no entry of {self._file} matches {sizes}"])

    def add(self) -> None:
        """Adds this configuration, unless it is there. Does nothing if the file cannot be read or written."""
        entry = {**_OURS, "data": {_MODEL: self._model, **self._sizes}}
        with contextlib.suppress(OSError, ValueError):
            entries = self._read() if self._file.exists() else []
            if entry in entries:
                return
            unfinished = self._file.with_suffix(f".{uuid.uuid4().hex}")
            try:
                private_files.write_text(unfinished, json.dumps([*entries, entry], indent=1))
                unfinished.replace(self._file)
            finally:
                unfinished.unlink(missing_ok=True)

    def _read(self) -> list[Any]:
        entries = json.loads(self._file.read_text(encoding="utf-8")) or []
        if not isinstance(entries, list):
            raise ValueError("it holds no list of entries")  # noqa: TRY004 - a fault of the file
        return entries

    def _matches(self, entry: Mapping[str, Any]) -> bool:
        data = entry["data"]
        return not any(name in data for name in _STATIC) and self._sizes.items() <= data.items()

    def _differences(self, entry: Mapping[str, Any]) -> list[str]:
        lines = []
        if not _OURS.items() <= entry.items():
            programs = [f"{program} {entry[name]}" for program, name in _VERSIONS.items() if name in entry]
            by = " and ".join(programs) or "another program"
            lines.append(f"the code of an entry of {self._file} was compiled by {by}, and is not used here")
        if (model := entry["data"][_MODEL]) != self._model:
            lines.append(f"the entry of {self._file} is for model {model}, not {self._model}")
        return lines
