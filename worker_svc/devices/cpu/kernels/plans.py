"""A step's arguments for attention programs: the addresses of its lengths and places.

The structure mirrors `program.h`.
"""

import ctypes
import functools

import torch

from worker_svc.devices.attention import AttentionParams, PackedPlan, PagedInput, RowsPlan


class _Plan(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("seq_lens", "query_start", "block_table", "slot_mapping")),
        *(
            (name, ctypes.c_int64)
            for name in ("width", "rows", "num_tokens", "total", "block_size", "longest_query", "longest")
        ),
    )


class AttentionPlan:
    """A step's attention for a KV group."""

    def __init__(self, library: ctypes.CDLL, block_size: int, step: PagedInput) -> None:
        """Stores the addresses of the step's tensors and keeps the tensors alive."""
        self._step = step
        self._plan = _Plan(
            step.seq_lens.data_ptr(), step.query_start.data_ptr(), step.block_table.data_ptr(),
            step.slot_mapping.data_ptr(), step.block_table.stride(0), step.seq_lens.shape[0], step.num_tokens,
            step.slot_mapping.shape[0], block_size,
        )  # fmt: skip
        self.address = ctypes.addressof(self._plan)
        library.triptych_prepare(self.address)


class TextsPlan:
    """A step's attention for layers without a cache: the places of its texts."""

    def __init__(self, lengths: torch.Tensor, row_len: int | None, params: AttentionParams) -> None:
        """Stores the places of the texts.

        Args:
            lengths: int64 [texts], their tokens; 0 for none.
            row_len: tokens of a row with a single text, padding included; `None` for consecutive texts.
            params: of the layers.
        """
        self._source = lengths, row_len, params
        count = lengths.shape[0]
        starts = lengths.cumsum(0) - lengths if row_len is None else row_len * torch.arange(count)
        self._at = lengths.to(torch.int32), starts.to(torch.int32)
        self._plan = _Plan(
            self._at[0].data_ptr(), self._at[1].data_ptr(), rows=count,
            num_tokens=int(lengths.sum()) if row_len is None else count * row_len,
        )  # fmt: skip
        self.address = ctypes.addressof(self._plan)

    @functools.cached_property
    def plain(self) -> PackedPlan | RowsPlan:
        """The plan of the layers that `Kernels.attention_of_texts` does not serve."""
        lengths, row_len, params = self._source
        return PackedPlan.of(lengths, params) if row_len is None else RowsPlan.of(lengths, row_len, params)
