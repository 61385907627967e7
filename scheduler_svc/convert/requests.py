"""Requests of clients: protocol messages to submissions."""

import secrets
from collections.abc import Sequence

from protos.errors import InvalidArgument, NotFound
from protos.triptych.v1 import common_pb2, inference_pb2, worker_pb2
from scheduler_svc.convert.sampling import sampling_from_proto, set_fields
from scheduler_svc.pooling.engine import PoolSubmission
from scheduler_svc.requests.admission import Submission
from scheduler_svc.requests.request import Pooling, PoolTask
from scheduler_svc.requests.sequence_group import MAX_SEQUENCES, Resumed

MAX_REQUEST_ID_BYTES = 128
MAX_NAME_BYTES = 256

_POOL_TASKS = {
    common_pb2.POOL_TASK_EMBED: PoolTask.EMBED,
    common_pb2.POOL_TASK_CLASSIFY: PoolTask.CLASSIFY,
    common_pb2.POOL_TASK_SCORE: PoolTask.SCORE,
}


def check_salt(cache_salt: str) -> None:
    """Refuses a salt that no client needs and every key would be made of.

    Raises:
        InvalidArgument: if it is too long.
    """
    if len(cache_salt.encode()) > MAX_NAME_BYTES:
        raise InvalidArgument(f"cache_salt is longer than {MAX_NAME_BYTES} bytes", param="cache_salt")


def submission_from_proto(request: inference_pb2.GenerateRequest) -> Submission:
    """Validates a request as far as that is possible without knowing the model.

    Raises:
        InvalidArgument: naming the field, its bounds and what was sent.
    """
    _check_common(request)
    if request.lora_name:
        raise NotFound(f"no adapter is called {request.lora_name!r}", param="lora_name")
    sampling = request.sampling
    max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else None
    if max_tokens == 0:
        raise InvalidArgument("max_tokens must be at least 1", param="max_tokens")
    n = request.n if request.HasField("n") else 1
    if not 1 <= n <= MAX_SEQUENCES:
        raise InvalidArgument(f"n must be between 1 and {MAX_SEQUENCES}, not {n}", param="n")
    return Submission(
        request_id=request.request_id or secrets.token_hex(16),
        prompt_token_ids=tuple(request.prompt_token_ids),
        sampling=sampling_from_proto(sampling),
        max_tokens=max_tokens,
        n=n,
        resumed=_resumed_from_proto(request.resumed, n),
        priority=request.priority,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        sampling_fields=set_fields(sampling),
    )


def _resumed_from_proto(resumed: Sequence[inference_pb2.ResumedSequence], n: int) -> tuple[Resumed, ...]:
    if not resumed:
        return ()
    numbers = {one.sequence for one in resumed}
    if len(numbers) < len(resumed) or max(numbers) >= n:
        raise InvalidArgument(f"resumed must name each sequence below n={n} at most once", param="resumed")
    if sum(one.finished for one in resumed) == n:
        raise InvalidArgument("all sequences have finished already; nothing is left to run", param="resumed")
    return tuple(Resumed(one.sequence, tuple(one.token_ids), one.finished) for one in resumed)


def pool_submission_from_proto(request: inference_pb2.PoolRequest) -> PoolSubmission:
    """The same for a pooling request.

    Raises:
        InvalidArgument: naming the field, its bounds and what was sent.
    """
    _check_common(request)
    task = _POOL_TASKS.get(request.task or common_pb2.POOL_TASK_EMBED)
    if task is None:
        raise InvalidArgument(f"task {request.task} is not known; send POOL_TASK_EMBED", param="task")
    return PoolSubmission(
        request_id=request.request_id or secrets.token_hex(16),
        prompt_token_ids=tuple(request.prompt_token_ids),
        pooling=Pooling(task, request.normalize if request.HasField("normalize") else None),
        priority=request.priority,
        tenant=request.tenant,
    )


def _check_common(request: inference_pb2.GenerateRequest | inference_pb2.PoolRequest) -> None:
    if not request.prompt_token_ids:
        raise InvalidArgument("the prompt is empty; send at least one token", param="prompt_token_ids")
    if len(request.request_id.encode()) > MAX_REQUEST_ID_BYTES:
        raise InvalidArgument(f"request_id is longer than {MAX_REQUEST_ID_BYTES} bytes", param="request_id")
    if len(request.tenant.encode()) > MAX_NAME_BYTES:
        raise InvalidArgument(f"tenant is longer than {MAX_NAME_BYTES} bytes", param="tenant")
    check_salt(getattr(request, "cache_salt", ""))


def pool_tasks_from_proto(description: worker_pb2.DescribeResponse) -> frozenset[PoolTask]:
    """What a pooling model's results are for; empty for a model that generates."""
    return frozenset(_POOL_TASKS[task] for task in description.pool_tasks if task in _POOL_TASKS)
