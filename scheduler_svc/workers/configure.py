"""Configures the ranks of a replica: describes and compares them, and sends all the same request."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import grpc.aio

from protos.errors import (
    ConfigurationRefused,
    Internal,
    SchemaMismatch,
    Unavailable,
    from_rpc_error,
)
from protos.service.grpc_options import SCHEMA_REVISION
from protos.service.logs import get_logger
from protos.triptych.v1 import worker_pb2
from scheduler_svc.workers.deployment import Deployment
from scheduler_svc.workers.descriptions import (
    WorkerDescription,
    configured_description,
    description_from_proto,
)
from scheduler_svc.workers.model_files import FileReceiver
from scheduler_svc.workers.rank import Rank, ReplicaLost, differing_rank, ranks_text
from scheduler_svc.workers.replicas import Configured

# Describe needs the worker's process and the configuration of its model, but no weights.
DESCRIBE_TIMEOUT_S = 60.0

MODEL_FILES_TIMEOUT_S = 120.0

# A busy worker ends the stream of a lost scheduler within this time after its last step.
CONFIGURE_RETRY_S = 60.0

_Answer = TypeVar("_Answer")


class Configurator:
    """Configures all ranks of a replica."""

    def __init__(self, ranks: Sequence[Rank], deployment: Deployment) -> None:
        """Prepares to configure a replica of the deployment."""
        self._ranks = ranks
        self._replica_id = ranks[0].replica_id
        self._sizes = ranks[0].sizes
        self._deployment = deployment
        self._step_timeout_s = deployment.settings.step_timeout_s
        self._log = get_logger(replica=self._replica_id)
        # The last progress of each rank.
        self._progress: dict[int, str] = {}

    async def run(self) -> Configured:
        """Configures all ranks at once, with the same request.

        Raises:
            ConfigurationRefused: no rank can run with the scheduler's settings.
            ReplicaLost: a rank refuses, fails, differs from rank 0, or belongs to another group.
            TriptychError: a rank could not be described.
            grpc.aio.AioRpcError: rank 0 sends no files.
        """
        self._deployment.starting[self._replica_id] = "dialling"
        messages = await self._on_all(self._describe)
        description = self._common_description([description_from_proto(message) for message in messages])
        setup = self._deployment.set_up(self._replica_id, description)
        setup.request.step_timeout_s = self._step_timeout_s
        setup.request.group_epoch = self._group_epoch([message.group_epoch for message in messages])
        self._log.info(
            "configuring", device=description.device, model=description.model.source, **setup.facts
        )
        answers = await self._on_all(lambda rank: self._configure(rank, setup.request))
        self._check_equal(answers, description.model.source)
        files = FileReceiver()
        async for chunk in self._ranks[0].stub.GetModelFiles(
            worker_pb2.GetModelFilesRequest(), timeout=MODEL_FILES_TIMEOUT_S
        ):
            files.add(chunk.name, chunk.data, last=chunk.last)
        first_s = max(answer.first_step_timeout_s for answer in answers)
        configured = configured_description(description, answers)
        return Configured(configured, setup, answers[0], first_s, files.files())

    async def _on_all(self, call: Callable[[Rank], Awaitable[_Answer]]) -> list[_Answer]:
        """Runs a call on every rank at once; returns the answers by rank. A failure cancels the others."""
        calls = [asyncio.ensure_future(call(rank)) for rank in self._ranks]
        try:
            return await asyncio.gather(*calls)
        finally:
            for each in calls:
                each.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _describe(self, rank: Rank) -> worker_pb2.DescribeResponse:
        try:
            message = await rank.stub.Describe(
                worker_pb2.DescribeRequest(schema_revision=SCHEMA_REVISION),
                timeout=DESCRIBE_TIMEOUT_S,
                wait_for_ready=True,
            )
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error)
            if self._sizes.world_size > 1:
                failure.message = f"{rank.name} does not describe itself: {failure.message}"
            raise failure from error
        if message.schema_revision != SCHEMA_REVISION:
            raise SchemaMismatch(
                f"the worker of {rank.name} speaks schema revision {message.schema_revision}, this scheduler {SCHEMA_REVISION}; "
                "run the same release on both"
            )
        return message

    def _common_description(self, descriptions: list[WorkerDescription]) -> WorkerDescription:
        """Returns the description of the replica; refuses differences between ranks."""
        if (differing := differing_rank(descriptions)) is not None:
            rank, difference = differing
            raise self._refused(
                rank, f"{difference}; start all ranks of a replica with the same model and devices"
            )
        return replace(descriptions[0], pipeline_stages=self._sizes.pipeline)

    def _group_epoch(self, epochs: list[str]) -> str:
        """Returns the name of the group, new unless all ranks formed it before."""
        if self._sizes.world_size == 1:
            return ""
        if len(set(epochs)) == 1:
            return epochs[0] or uuid.uuid4().hex
        stale = [rank for rank, epoch in enumerate(epochs) if epoch]
        raise ReplicaLost(
            f"{ranks_text(stale)} of replica {self._replica_id} cannot join the other ranks, because an earlier group "
            "has been joined; processes that joined it start again"
        )

    async def _configure(self, rank: Rank, request: worker_pb2.ConfigureRequest) -> worker_pb2.ConfigureReady:
        """Configures a rank; asks again while the rank is not free."""
        now = asyncio.get_running_loop().time
        deadline = now() + CONFIGURE_RETRY_S + self._step_timeout_s
        while True:
            try:
                return await self._configure_once(rank, request)
            except ReplicaLost as error:
                retry_ms = error.cause.retry_after_ms if isinstance(error.cause, Unavailable) else 0
                if not retry_ms or now() > deadline:
                    raise
                self._log.info("configure_again", worker=rank.worker_id, reason=error.message)
            await asyncio.sleep(retry_ms / 1000)

    async def _configure_once(
        self, rank: Rank, request: worker_pb2.ConfigureRequest
    ) -> worker_pb2.ConfigureReady:
        # No limit here: only the worker knows how long its model and its compiler may be silent, and it ends
        # itself beyond that (--configure-hang-timeout-s).
        try:
            async for event in rank.stub.Configure(request):
                if event.HasField("ready"):
                    return event.ready
                self._note_progress(rank, event.progress)
        except grpc.aio.AioRpcError as error:
            raise rank.lost(from_rpc_error(error)) from error
        raise rank.lost(Internal("the worker ended Configure before it was ready"))

    def _check_equal(self, answers: list[worker_pb2.ConfigureReady], source: str) -> None:
        """Checks that all ranks are configured alike."""
        first = answers[0]
        for rank, answer in zip(self._ranks, answers, strict=True):
            if answer.weights_digest != first.weights_digest:
                raise self._refused(
                    rank.number,
                    f"has other weights of {source} (digest {answer.weights_digest[:12]}) than rank 0 "
                    f"({first.weights_digest[:12]}); give all ranks the same files",
                )
            if answer.num_blocks != first.num_blocks:
                counts = f"{list(answer.num_blocks)} KV blocks and rank 0 has {list(first.num_blocks)}"
                raise rank.lost(Internal(f"{rank.name} has {counts}; ranks must agree"))

    def _refused(self, number: int, text: str) -> ReplicaLost:
        rank = self._ranks[number]
        return rank.lost(ConfigurationRefused(f"{rank.name} {text}"))

    def _note_progress(self, rank: Rank, progress: worker_pb2.ConfigureProgress) -> None:
        phase = worker_pb2.ConfigureProgress.Phase.Name(progress.phase).removeprefix("PHASE_").lower()
        count = f" {progress.done}/{progress.total}" if progress.total else ""
        self._progress[rank.number] = f"{phase}{count} {progress.message}".strip()
        self._deployment.starting[self._replica_id] = "; ".join(
            f"rank {number}: {text}" if len(self._ranks) > 1 else text
            for number, text in sorted(self._progress.items())
        )
        self._log.info(
            "progress",
            worker=rank.worker_id,
            target=rank.target,
            phase=phase,
            done=progress.done,
            total=progress.total,
            message=progress.message,
        )
