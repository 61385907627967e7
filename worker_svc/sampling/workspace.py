"""Memory reused by every step, so no step allocates megabytes."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from worker_svc.devices.base import is_host

_FLOAT32, _INT32, _INT64 = 4, 4, 8
# A tile of this size stays in the processor's cache from one operation to the next.
_CACHE_BYTES = 10 << 20


@dataclass(frozen=True)
class Tile:
    """Temporary tensors [rows, vocab] for some of a step's rows.

    Their contents mean nothing between steps.
    """

    logits: torch.Tensor
    """float32: the adjusted logits, until the filters overwrite them."""
    weights: torch.Tensor
    """float32: `exp(logit - largest logit)`."""
    words: torch.Tensor
    """int32, for the filters' bins and comparisons."""
    mass: torch.Tensor
    """int64: the masses of the kept tokens."""
    places: torch.Tensor
    """int64, for indices into histograms and for masks of `mass`."""


class Workspace:
    """The logits of a step, and temporary tensors for a tile of its rows: a few rows on a CPU, else all."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        """Allocates memory for steps of up to `rows` rows."""
        tile = rows
        if is_host(device):
            # At least one row per thread: a single row's histogram is built by one core.
            tile = min(rows, max(torch.get_num_threads(), _CACHE_BYTES // (vocab * _PER_TILE_ELEMENT)))
        self._logits = torch.empty((rows, vocab), device=device)
        self._weights = torch.empty((tile, vocab), device=device)
        self._words = torch.empty((tile, vocab), dtype=torch.int32, device=device)
        self._mass = torch.empty((tile, vocab), dtype=torch.int64, device=device)
        self._places = torch.empty((tile, vocab), dtype=torch.int64, device=device)

    @property
    def num_rows(self) -> int:
        """Largest number of rows in a step."""
        return self._logits.shape[0]

    def logits(self, rows: int) -> torch.Tensor:
        """Returns a buffer for the logits of a step, float32 [rows, vocab]."""
        return self._logits[:rows]

    def tiles(self, rows: int) -> Iterator[tuple[slice, Tile]]:
        """Yields the rows in tiles, each with its tensors.

        All tiles share their memory, except the logits.
        """
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
"""Upper bound on the workspace, in bytes per element of [rows, vocab]."""
