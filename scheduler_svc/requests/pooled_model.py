"""What a pooling model serves, and the checks of requests against it."""

from dataclasses import dataclass
from typing import Final

from protos.errors import ContextExceeded, Unsupported
from protos.service.grpc_options import MAX_MESSAGE_BYTES
from protos.steps import PoolShape, format_shapes
from protos.triptych.v1 import common_pb2
from protos.validation import check_ids
from scheduler_svc.requests.admission import Submission
from scheduler_svc.requests.sampling import NO_SAMPLING, StopRule

MOST_VALUES: Final = (MAX_MESSAGE_BYTES - (1 << 20)) // 4
"""Values of float32 in one message, with room for the rest of it."""

_NO_STOP: Final = StopRule.from_sampling(NO_SAMPLING, frozenset(), max_tokens=0)
_EMBEDDINGS: Final = frozenset({common_pb2.POOL_TASK_EMBED, common_pb2.POOL_TASK_TOKEN_EMBED})


@dataclass(frozen=True, slots=True)
class PooledModel:
    """The limits of the served model, if it is a pooling model."""

    vocab_size: int
    """Token ids are below this."""
    tasks: frozenset[int]
    """The tasks that the model's results serve."""
    size: int
    """Values of one vector."""
    info: common_pb2.PoolingInfo
    """The worker's message; says what requests may ask for."""
    shapes: tuple[PoolShape, ...]
    """The static shapes of the deployment, ascending."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt, tokens."""
        return self.shapes[-1].prompt_len

    def check(self, submission: Submission, most_tokens: int) -> StopRule:
        """Checks a submission; returns the rule of a sequence that generates nothing.

        Raises:
            Unsupported: it generates, or asks for a task, dimensions or a second text that is not served.
            InvalidArgument: a token id is not the model's.
            ContextExceeded: the prompt fits no shape.
        """
        del most_tokens  # a pooling model has no KV memory
        if submission.pooling is None:
            raise Unsupported("this is a pooling model and generates no text; call Pool", param="model")
        self._check_task(submission.pooling)
        check_ids("prompt_token_ids", submission.prompt_token_ids, self.vocab_size)
        count, longest = len(submission.prompt_token_ids), self.max_model_len
        if count > longest:
            raise ContextExceeded(
                f"the prompt has {count} tokens and fits none of the shapes {format_shapes(self.shapes)}; "
                f"shorten it to at most {longest} tokens",
                param="prompt",
            )
        return _NO_STOP

    def _check_task(self, pooling: common_pb2.PoolingParams) -> None:
        task = pooling.task
        if task not in self.tasks:
            served = ", ".join(sorted(map(_task_name, self.tasks)))
            raise Unsupported(f"this model serves {served}, not {_task_name(task)}", param="task")
        if pooling.second_text_at and not self.info.token_types:
            raise Unsupported(
                "this model does not mark the second text of a pair; omit second_text_at",
                param="second_text_at",
            )
        asked = pooling.dimensions
        if asked and (refusal := self._refusal(asked, is_embedding=task in _EMBEDDINGS)):
            raise Unsupported(f"dimensions={asked} is not supported: {refusal}", param="dimensions")

    def _refusal(self, dimensions: int, *, is_embedding: bool) -> str:
        """Returns why results cannot have so many dimensions; empty if they can."""
        if not is_embedding:
            return "the results are not embeddings; omit it"
        if dimensions == self.size:
            return ""
        if not self.info.matryoshka:
            return f"this model's embeddings have {self.size}, and it was not trained to be cut (Matryoshka); omit it"
        allowed = self.info.matryoshka_dimensions
        if dimensions > self.size or (allowed and dimensions not in allowed):
            names = ", ".join(map(str, allowed)) if allowed else f"1 to {self.size}"
            return f"this model's embeddings can be cut to {names}"
        return ""


def _task_name(task: int) -> str:
    return common_pb2.PoolTask.Name(common_pb2.PoolTask.ValueType(task)).removeprefix("POOL_TASK_").lower()
