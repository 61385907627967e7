"""What the configured ranks of a replica can do together."""

import pytest

from protos.triptych.v1 import worker_pb2
from scheduler_svc.kv.cache import ChunkStarts
from scheduler_svc.workers.descriptions import configured_description, description_from_proto

DESCRIPTION = description_from_proto(worker_pb2.DescribeResponse())


@pytest.mark.parametrize(
    ("answers", "together"),
    [
        ([worker_pb2.CHUNK_STARTS_EXACT] * 2, "exact"),
        ([worker_pb2.CHUNK_STARTS_EXACT, worker_pb2.CHUNK_STARTS_ANYWHERE], "anywhere"),
        ([worker_pb2.CHUNK_STARTS_WHOLE, worker_pb2.CHUNK_STARTS_EXACT], "whole"),
        ([worker_pb2.CHUNK_STARTS_UNSPECIFIED], "whole"),
    ],
)
def test_the_weakest_rank_decides(
    answers: "list[worker_pb2.ChunkStarts.ValueType]", together: ChunkStarts
) -> None:
    """Chunks are exact only if every rank computes them so; a worker that says nothing is the weakest."""
    ready = [worker_pb2.ConfigureReady(chunk_starts=starts) for starts in answers]
    assert configured_description(DESCRIPTION, ready).chunk_starts == together
