"""Reads GGUF files: their metadata, and name, type, shape and bytes of their tensors.

`gguf.GGUFReader` reads past the end of a cut file, takes an object for each element that a damaged count
promises, and drops the name of a type that it does not know.
"""

import functools
import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize

# Name of a file that is a part of a model: stem, number from 1, number of parts.
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# NumPy's types by GGUF's numbers.
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
# Vocabularies have less than a million texts.
_MOST_TEXTS = 1 << 24
_MOST_DIMENSIONS = 4
# The gguf package lacks withdrawn types of tensors, and those of ik_llama.cpp.
_TYPE_NAMES = {each.value: each.name for each in gguf.GGMLQuantizationType} | {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8", 133: "Q6_0", 137: "IQ2_K", 138: "IQ3_K", 139: "IQ4_K", 140: "IQ5_K", 141: "IQ6_K",
    144: "IQ4_KS", 145: "IQ2_KS", 146: "IQ4_KSS", 152: "IQ5_KS", 153: "IQ2_KT", 154: "IQ3_KT", 155: "IQ4_KT",
    156: "IQ3_KS", 157: "IQ2_KL", 158: "IQ1_KT",
}  # fmt: skip
_INCOMPLETE = "it is not a complete GGUF file; fetch it again"
_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    """Rows first, as in PyTorch."""
    data: npt.NDArray[np.uint8]
    """[rows, bytes of a row]."""


class GgufFile:
    """A model's file, or its parts joined."""

    def __init__(self, source: Path) -> None:
        """Reads the headers of a file, and of the others if it is a part of a model.

        `ValueError` says why they cannot be read; the file is the sentence's "it".
        """
        self._values, self.tensors = _read(source)
        count, number = self.field("split.count", int, 1), self.field("split.no", int, 0)
        if count > 1:
            self._join(source, number + 1, count)

    def _join(self, source: Path, number: int, count: int) -> None:
        match = _PART.fullmatch(source.name)
        part = f"it is part {number} of {count}"
        if match is None or (int(match[2]), int(match[3])) != (number, count):
            raise ValueError(
                f"{part}; its name must end in -{number:05}-of-{count:05}.gguf to find the other parts"
            )
        tensors: dict[str, StoredTensor] = {}
        for each in range(1, count + 1):
            path = source.with_name(f"{match[1]}-{each:05}-of-{count:05}.gguf")
            if not path.is_file():
                raise ValueError(f"{part}, but part {each}, {path.name}, is missing; add it to the folder")
            try:
                values, own = _read(path)
            except ValueError as error:
                raise ValueError(f"{part}, and of part {each}, {path.name}: {error}") from None
            numbers = values.get("split.no"), values.get("split.count")
            if numbers != (each - 1, count) or tensors.keys() & own.keys():
                raise ValueError(f"{part}, but {path.name} is another part or model; fetch it again")
            tensors |= own
            if each == 1:
                self._values = values  # other parts have tensors alone
        self.tensors = tensors

    def field(self, name: str, kind: type[_Kind], default: _Kind | None = None) -> _Kind:
        """Returns an entry of the metadata.

        `ValueError` if it is absent and has no default, or if it is of another kind.
        """
        found: Any = self._values.get(name, default)
        if found is None:
            raise ValueError(f"its metadata lack {name}; convert the model to GGUF again")
        if kind is float and type(found) is int:
            found = float(found)
        if type(found) is not kind or (isinstance(found, list) and not all(type(e) is str for e in found)):
            wanted = "list of texts" if kind is list else kind.__name__
            raise ValueError(f"{name} in its metadata is not of the type {wanted}; convert the model again")
        return found

    def numbers(self, name: str, least: int) -> npt.NDArray[Any] | None:
        """Returns an array of at least so many numbers; `None` if there is none."""
        found = self._values.get(name)
        if found is not None and (not isinstance(found, np.ndarray) or len(found) < least):
            raise ValueError(f"{name} in its metadata is not {least} numbers; convert the model again")
        return found

    def same_in_layers(self, name: str, layers: int, default: int | None = None) -> int:
        """Returns a number that the metadata have once, or equal for each layer."""
        found = self._values.get(name)
        if not isinstance(found, np.ndarray):
            return self.field(name, int, default)
        if len(found) != layers or not layers:
            raise ValueError(f"{name} has {len(found)} numbers for {layers} layers; convert the model again")
        if (found != found[0]).any():
            raise ValueError(f"layers of different sizes ({name}) are not supported; use another model")
        return int(found[0])


@functools.cache
def _is_supported(number: int) -> bool:
    """Whether the gguf package dequantizes tensors of a type."""
    try:
        kind = gguf.GGMLQuantizationType(number)
        dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (ValueError, NotImplementedError):
        return False
    return True


def _read(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    with path.open("rb") as file:
        try:
            header = _Header(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except ValueError:  # it is empty
            raise ValueError(_INCOMPLETE) from None
    return header.read()


class _Header:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        if self._data[:4] != b"GGUF"[: len(self._data)]:
            raise ValueError("it is not a GGUF file")
        self._at = 4
        (version,) = self._unpack("I")
        if not version & 0xFFFF:
            raise ValueError("it is big-endian; convert it with llama.cpp's gguf_convert_endian.py")
        if version not in _VERSIONS:
            raise ValueError(
                f"GGUF version {version} is not supported, only 2 and 3; convert the model again"
            )
        num_tensors, num_values = self._unpack("QQ")
        values: dict[str, Any] = {}
        for _ in range(num_values):
            name = self._text()
            if name in values:
                raise ValueError(f"its metadata have {name} twice; convert the model again")
            values[name] = self._value(name, *self._unpack("I"))
        infos = {}
        for _ in range(num_tensors):
            name = self._text()
            if name in infos:
                raise ValueError(f"it has the tensor {name} twice; convert the model again")
            infos[name] = self._info(name)
        align = values.get("general.alignment", 32)
        if type(align) is not int or align < 1 or align & (align - 1):
            raise ValueError(f"general.alignment is {align}, not a power of two; convert the model again")
        return values, self._place(infos, align)

    def _take(self, size: int) -> int:
        """Returns the place of the next bytes, and passes them."""
        at, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise ValueError(_INCOMPLETE)
        return at

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack_from(f"<{form}", self._data, self._take(struct.calcsize(f"<{form}")))

    def _text(self) -> str:
        (size,) = self._unpack("Q")
        at = self._take(size)
        try:
            return self._data[at : at + size].decode()
        except UnicodeDecodeError:
            raise ValueError("it has a text that is not UTF-8; fetch it again, or convert it again") from None

    def _value(self, name: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        is_array = kind == _ARRAY
        kind, count = self._unpack("IQ") if is_array else (kind, 1)
        if is_array and kind == _STRING:
            if count > _MOST_TEXTS:
                raise ValueError(_INCOMPLETE)
            return [self._text() for _ in range(count)]
        if kind not in _NUMBERS:
            raise ValueError(f"{name} in its metadata has the unknown type {kind}; fetch it again")
        size = np.dtype(_NUMBERS[kind]).itemsize
        found = np.frombuffer(self._data, _NUMBERS[kind], count, self._take(count * size))
        return found if is_array else found[0].item()

    def _info(self, name: str) -> tuple[gguf.GGMLQuantizationType, tuple[int, ...], int]:
        """Returns type, shape and place of a tensor."""
        (dimensions,) = self._unpack("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name} has {dimensions} dimensions; fetch the file again")
        shape = tuple(reversed(self._unpack(f"{dimensions}Q")))
        number, offset = self._unpack("IQ")
        if not _is_supported(number):
            title = _TYPE_NAMES.get(number, f"number {number}")
            raise ValueError(
                f"tensor {name} has the type {title}, which is not supported; use another quantization of the model"
            )
        return gguf.GGMLQuantizationType(number), shape, offset

    def _place(self, infos: dict[str, Any], align: int) -> dict[str, StoredTensor]:
        """Finds the tensors' bytes, which follow each other."""
        start, expected = -(-self._at // align) * align, 0
        found = {}
        for name, (kind, shape, offset) in infos.items():
            block, size = gguf.GGML_QUANT_SIZES[kind]
            columns = shape[-1] if shape else 1
            if 0 in shape or columns % block:
                raise ValueError(f"tensor {name} is {list(shape)}, but {kind.name} has blocks of {block}")
            if offset != expected:
                raise ValueError(
                    f"tensor {name} is at byte {offset} of the tensors instead of {expected}; fetch the file again"
                )
            rows, row = math.prod(shape[:-1]), columns // block * size
            self._at = start + offset
            data = np.frombuffer(self._data, np.uint8, rows * row, self._take(rows * row))
            found[name] = StoredTensor(kind, shape, data.reshape(rows, row))
            expected += -(-rows * row // align) * align
        return found
