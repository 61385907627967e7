"""Writes the values of results: as JSON, as base64, or as bytes."""

import array
import base64
import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson

from gateway.pooling.schemas import EncodedBody
from protos.triptych.v1 import inference_pb2 as inference

if TYPE_CHECKING:
    import numpy as np

# Values per copy, which holds up other threads.
_VALUES_AT_ONCE: Final = 64 * 1024

# Half of bfloat16's lowest bit, minus one.
_ALMOST_HALF: Final = 0x7FFF

# Bits of the fraction, the exponent's bias, and the code of the largest number, which is infinity in e5m2.
_EIGHT_BITS: Final = {"fp8_e4m3": (3, 7, 126), "fp8_e5m2": (2, 15, 124)}


def as_json(response: inference.PoolResponse, body: EncodedBody) -> Any:
    """Returns a result as numbers, rows of numbers or base64, as the request asks."""
    if body.encoding_format == "base64":
        return base64.b64encode(as_bytes(response.values, body)).decode()
    return as_numbers(response)


def as_numbers(response: inference.PoolResponse) -> orjson.Fragment:
    """Returns the JSON of numbers, or of rows of numbers.

    It is written row by row, because each call of the encoder holds up other threads.
    """
    values = response.values
    if len(response.shape) < 2:
        return orjson.Fragment(orjson.dumps(list(values)))
    width = response.shape[1]
    rows = (orjson.dumps(values[start : start + width]) for start in range(0, len(values), width))
    return orjson.Fragment(b"[" + b",".join(rows) + b"]")


def as_bytes(values: Sequence[float], body: EncodedBody) -> bytes:
    """Returns ``values`` in the type and the order of bytes that a request asks for."""
    floats = array.array("f")
    for start in range(0, len(values), _VALUES_AT_ONCE):
        floats.extend(values[start : start + _VALUES_AT_ONCE])
    numbers = floats if body.embed_dtype == "float32" else _shorter(floats, body.embed_dtype)
    order = "big" if body.endianness == "big" else "little"
    if order != sys.byteorder:
        numbers.byteswap()
    return numbers.tobytes()


def _shorter(floats: "array.array[float]", dtype: str) -> "array.array[Any]":
    """Returns numbers of 16 or 8 bits, each rounded to the nearest, ties to even."""
    # It takes a tenth of a second to load, and few requests need it.
    import numpy as np

    if dtype in _EIGHT_BITS:
        return array.array("B", _eight_bits(np.frombuffer(floats, np.float32), dtype).tobytes())
    if dtype == "float16":
        with np.errstate(over="ignore"):
            short = np.frombuffer(floats, np.float32).astype(np.float16)
    else:
        bits = np.frombuffer(floats, np.uint32)
        short = ((bits + _ALMOST_HALF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return array.array("H", short.tobytes())


def _eight_bits(
    numbers: "np.ndarray[Any, np.dtype[np.float32]]", dtype: str
) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Returns the codes of the nearest numbers of 8 bits.

    As in torch, e4m3 ends at 448, and e5m2 at infinity.
    """
    import numpy as np

    bounds, sizes = _bounds(dtype), np.abs(numbers).astype(np.float64)
    codes = np.searchsorted(bounds, sizes).astype(np.uint8)
    # The code of a middle is now the lower neighbour's; if it is odd, the next is even.
    ties = (codes < len(bounds)) & (bounds[np.minimum(codes, len(bounds) - 1)] == sizes) & (codes % 2 == 1)
    codes = np.where(np.isnan(sizes), 127, codes + ties)
    signed: np.ndarray[Any, np.dtype[np.uint8]] = (codes | np.signbit(numbers) * 128).astype(np.uint8)
    return signed


@functools.cache
def _bounds(dtype: str) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Returns the middle between each positive number of 8 bits, in the order of the codes, and the next."""
    import numpy as np

    fraction_bits, bias, largest = _EIGHT_BITS[dtype]
    codes = np.arange(largest + 1)
    exponents, fractions = codes >> fraction_bits, codes % (1 << fraction_bits)
    mantissas = (exponents > 0) + fractions / (1 << fraction_bits)
    values = mantissas * 2.0 ** (np.maximum(exponents, 1) - bias)
    middles: np.ndarray[Any, np.dtype[np.float64]] = (values[:-1] + values[1:]) / 2
    return middles


def description(
    parts: Sequence[bytes], responses: Sequence[inference.PoolResponse], body: EncodedBody
) -> list[dict[str, Any]]:
    """Returns where each result is in the bytes of all, and how to read it, as vLLM's clients expect it."""
    items, start = [], 0
    for index, (part, response) in enumerate(zip(parts, responses, strict=True)):
        items.append(
            {
                "index": index,
                "embed_dtype": body.embed_dtype,
                "endianness": body.endianness,
                "start": start,
                "end": start + len(part),
                "shape": list(response.shape),
            }
        )
        start += len(part)
    return items
