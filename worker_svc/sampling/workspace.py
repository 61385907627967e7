"""Memory that steps compute in: the same every time, so that no step asks the system for megabytes."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

_FLOAT32, _INT32, _INT64 = 4, 4, 8
# What a tile may take, so that it stays in a processor's cache from one operation to the next.
_CACHE_BYTES = 10 << 20


@dataclass(frozen=True)
class Tile:
    """Tensors [rows, vocab] for some of a step's rows, whose contents mean nothing between steps."""

    logits: torch.Tensor
    """float32."""
    weights: torch.Tensor
    """float32."""
    words: torch.Tensor
    """int32."""
    mass: torch.Tensor
    """int64."""
    places: torch.Tensor
    """int64."""


class Workspace:
    """Logits of all rows of a step, and what is computed of them for a tile of rows at a time: on a CPU few, elsewhere all."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        """For steps of up to so many rows."""
        tile = rows
        if device.type == "cpu":
            # Of one row only one core could count.
            tile = min(rows, max(torch.get_num_threads(), _CACHE_BYTES // (vocab * _PER_TILE_ELEMENT)))
        self._logits = torch.empty((rows, vocab), device=device)
        self._weights = torch.empty((tile, vocab), device=device)
        self._words = torch.empty((tile, vocab), dtype=torch.int32, device=device)
        self._mass = torch.empty((tile, vocab), dtype=torch.int64, device=device)
        self._places = torch.empty((tile, vocab), dtype=torch.int64, device=device)

    @property
    def num_rows(self) -> int:
        """How many rows there is room for."""
        return self._logits.shape[0]

    def logits(self, rows: int) -> torch.Tensor:
        """float32 [rows, vocab]."""
        return self._logits[:rows]

    def tiles(self, rows: int) -> Iterator[tuple[slice, Tile]]:
        """The rows in tiles, each with its memory, which the next one has too; but for its logits."""
        tile = self._weights.shape[0]
        for start in range(0, rows, tile):
            part = slice(start, min(start + tile, rows))
            count = part.stop - start
            yield (
                part,
                Tile(
                    self._logits[part],
                    self._weights[:count],
                    self._words[:count],
                    self._mass[:count],
                    self._places[:count],
                ),
            )


_PER_TILE_ELEMENT = _FLOAT32 + _INT32 + 2 * _INT64
WORKSPACE_BYTES = _FLOAT32 + _PER_TILE_ELEMENT
"""Of each element of [rows, vocab], at most."""
