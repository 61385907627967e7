"""Reads the headers of safetensors files and checks that the files are complete. Reads no weights."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from protos.errors import ConfigurationRefused

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHARDS = "*-of-*.safetensors"
# A second copy of the weights by some authors, and LoRA adapters.
_OTHERS = ("consolidated", "adapter_model")
_PICKLES = ("*.bin", "*.pt", "*.pth")
# safetensors itself refuses longer headers; such a file is of another kind.
_LONGEST_HEADER = 100_000_000
# Floating-point types that --dtype converts, with their bytes.
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# How the names of numbers in MXFP4 end; see `quantization.mxfp4`.
_MXFP4 = "_blocks"


@dataclass(frozen=True)
class Tensor:
    """The header entry of one tensor."""

    kind: str
    """Element type, as safetensors names it: for example "BF16"."""
    shape: tuple[int, ...]
    num_bytes: int
    """Bytes in the file."""

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Shard:
    """One file whose length matches its header."""

    path: Path
    tensors: Mapping[str, Tensor]
    """By name."""

    @classmethod
    def open(cls, path: Path) -> Self:
        """Reads the header.

        Raises:
            ConfigurationRefused: if the file cannot be read or is damaged, in one line.
        """
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                    raise _Damaged("its header is cut off, or it is not a safetensors file")
                header = json.loads(file.read(length))
            return cls(path, _tensors(header, size - 8 - length))
        except OSError as error:
            raise ConfigurationRefused(f"cannot read {path}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = str(error) if isinstance(error, _Damaged) else "its header cannot be read"
            raise ConfigurationRefused(f"{path} is damaged: {reason}; fetch it again") from error


class _Damaged(ValueError):  # noqa: N818 - describes the file
    """A file is damaged; the text says how."""


def _tensors(header: dict[str, Any], num_bytes: int) -> dict[str, Tensor]:
    """Returns the tensors of a parsed header.

    Args:
        header: the parsed header.
        num_bytes: the file's bytes after its header.

    Raises:
        _Damaged: if the tensors do not fill the file exactly.
    """
    found, end = {}, 0
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    for name, entry in sorted(entries.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        first, last = entry["data_offsets"]
        if first != end or last < first:
            raise _Damaged(f"tensor {name} does not begin where the previous one ends")
        shape = tuple(map(int, entry["shape"]))
        if entry["dtype"] in _FLOATS and math.prod(shape) * _FLOATS[entry["dtype"]] != last - first:
            raise _Damaged(f"the size of tensor {name} does not match its shape")
        found[name] = Tensor(entry["dtype"], shape, last - first)
        end = last
    if end > num_bytes:
        raise _Damaged(f"{end - num_bytes} of {end} bytes of weights are missing")
    if end < num_bytes:
        raise _Damaged(f"{num_bytes - end} bytes follow its last tensor")
    return found


@dataclass(frozen=True)
class Checkpoint:
    """The weight files of a model."""

    shards: tuple[Shard, ...]
    """At least one, ordered by name."""
    ignored: tuple[str, ...] = ()
    """Names of the folder's other safetensors files, ordered."""

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Finds a folder's weights and checks that they are complete.

        Raises:
            ConfigurationRefused: in one line, if there are no weights, only pickled ones, or some are
                missing.
        """
        found = sorted(folder.glob("*.safetensors"))
        index = folder / _INDEX
        shards = cls._indexed(folder, index) if index.is_file() else [*map(Shard.open, _weights(found))]
        if shards:
            taken = {shard.path for shard in shards}
            return cls(tuple(shards), tuple(path.name for path in found if path not in taken))
        pickled = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        if pickled:
            raise ConfigurationRefused(
                f"{folder} has only pickled weights ({pickled[0]}), and unpickling runs code;"
                " convert them to safetensors"
            )
        raise ConfigurationRefused(
            f"{folder} has no weights (*.safetensors); add them,"
            " or use --load-format dummy for made-up weights"
        )

    @staticmethod
    def _indexed(folder: Path, index: Path) -> list[Shard]:
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
            # An index is untrusted data: it may name files of this folder only.
            foreign = [name for name in names if Path(name).name != name]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationRefused(f"{index} cannot be read; fetch it again") from error
        if not names or foreign:
            raise ConfigurationRefused(
                f"{index} names {f'{foreign[0]}, which is outside its folder' if foreign else 'no files'};"
                " fetch it again"
            )
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ConfigurationRefused(
                f"{folder} lacks {len(missing)} of {len(names)} files that {index.name} names,"
                f" first {missing[0]}; fetch them"
            )
        shards = {name: Shard.open(folder / name) for name in names}
        for tensor, name in weight_map.items():
            if tensor not in shards[name].tensors:
                raise ConfigurationRefused(
                    f"{folder / name} has no tensor {tensor}, which {index.name} places there;"
                    " fetch both again"
                )
        return list(shards.values())

    def num_bytes(self, itemsize: int | None = None) -> int:
        """Returns the bytes of all weights, as stored or with `itemsize` bytes per floating-point element.

        Experts in MXFP4 count as what they become: two elements a byte, in bfloat16 without an `itemsize`.
        """

        def bytes_of(name: str, tensor: Tensor) -> int:
            if name.endswith(_MXFP4) and tensor.kind == "U8":
                return 2 * tensor.num_elements * (itemsize or _FLOATS["BF16"])
            return tensor.num_elements * itemsize if itemsize and tensor.kind in _FLOATS else tensor.num_bytes

        return sum(bytes_of(*each) for shard in self.shards for each in shard.tensors.items())


def _weights(found: list[Path]) -> list[Path]:
    """Returns the weights among a folder's safetensors files without an index, as transformers chooses."""
    own = [path for path in found if not path.name.startswith(_OTHERS)]
    single = [path for path in own if path.name == _SINGLE]
    shards = [path for path in own if path.match(_SHARDS)]
    copies = [path for path in found if path.name.startswith(_OTHERS[0])]
    return single or shards or own or copies
