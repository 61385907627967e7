"""Converts clients' requests from protocol messages to submissions."""

import secrets

from protos.errors import NotFound
from protos.triptych.v1 import common_pb2, inference_pb2
from protos.validation import check_generate, check_pool
from scheduler_svc.pooling.engine import PoolSubmission
from scheduler_svc.requests.admission import Submission
from scheduler_svc.requests.sampling import Sampling
from scheduler_svc.requests.sequence_group import Resumed


def submission_from_proto(request: inference_pb2.GenerateRequest) -> Submission:
    """Validates a request as far as that is possible without knowing the model.

    Raises:
        InvalidArgument: naming the field, its bounds and what was sent.
        NotFound: if the request names an adapter.
    """
    check_generate(request)
    if request.lora_name:
        raise NotFound(f"no adapter is called {request.lora_name!r}", param="lora_name")
    params = common_pb2.SamplingParams()
    params.CopyFrom(request.sampling)
    # Nothing bounds the size of fields that this schema does not have; a large one would exceed a plan's
    # message.
    params.DiscardUnknownFields()
    if not params.HasField("seed"):
        # Drawn once: a replay after a lost worker must continue with the same random numbers.
        params.seed = secrets.randbits(63)
    return Submission(
        request_id=request.request_id or secrets.token_hex(16),
        prompt_token_ids=tuple(request.prompt_token_ids),
        sampling=Sampling(params),
        n=request.n if request.HasField("n") else 1,
        resumed=tuple(Resumed(one.sequence, tuple(one.token_ids), one.finished) for one in request.resumed),
        priority=request.priority,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
    )


def pool_submission_from_proto(request: inference_pb2.PoolRequest) -> PoolSubmission:
    """Validates a pooling request as far as that is possible without knowing the model.

    Raises:
        InvalidArgument: naming the field, its bounds and what was sent.
    """
    check_pool(request)
    pooling = common_pb2.PoolingParams(task=request.task or common_pb2.POOL_TASK_EMBED)
    if request.HasField("normalize"):
        pooling.normalize = request.normalize
    return PoolSubmission(
        request_id=request.request_id or secrets.token_hex(16),
        prompt_token_ids=tuple(request.prompt_token_ids),
        pooling=pooling,
        priority=request.priority,
        tenant=request.tenant,
    )
