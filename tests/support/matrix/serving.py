"""A real stack for the matrix."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.support.prompts import PROMPTS as ALL_PROMPTS
from tests.support.stack import Stack, running_stack
from worker_svc.devices.cpu.kernels.build import KernelsUnavailable, has_matrix_units, library

PROMPTS: Final = tuple(ALL_PROMPTS[index] for index in (0, 11, 5, 9, 3, 7, 15))
"""5 to 253 tokens of SmolLM2: up to two chunks, so that prefills and decodes of a burst overlap."""
SHORTER_PROMPTS: Final = PROMPTS[:5]
"""Those with at most 130 tokens, of which two are in a second chunk."""


@contextlib.contextmanager
def matrix_stack(model: Path, run_dir: Path, *flags: str) -> Iterator[Stack]:
    """Runs SmolLM2 with default settings; the parser lets it choose tools."""
    with running_stack(model, "smollm2", run_dir, "--tool-call-parser", "hermes", *_dtype(), *flags) as stack:
        yield stack


def _dtype() -> tuple[str, ...]:
    """Returns flags for a type in which a row has the same bits in any batch.

    Our kernels do that in bfloat16. The wheel's, which run on processors with matrix units, do not.
    """
    with contextlib.suppress(KernelsUnavailable):
        library()
        if not has_matrix_units():
            return ()
    return ("--dtype", "float32")
