"""The configuration that a scheduler would send to a worker, without either service."""

from dataclasses import replace
from typing import TYPE_CHECKING

from protos.triptych.v1 import worker_pb2
from scheduler_svc.settings import Settings as SchedulerSettings

if TYPE_CHECKING:
    from worker_svc.execution.worker import Worker


def configuration(settings: SchedulerSettings, worker: "Worker") -> worker_pb2.ConfigureRequest:
    """Returns the configuration of a prepared worker.

    Raises:
        ConfigurationRefused: the settings contradict the model or the device.
    """
    # The worker's room imports torch.
    from scheduler_svc.convert.model import description_from_proto
    from scheduler_svc.workers.deployment import Deployment
    from worker_svc.api.convert import description_to_proto

    description = description_from_proto(description_to_proto(worker, worker_id="", model=""))
    layout = worker.layout
    description = replace(description, pipeline_stages=layout.pipeline, tensor_parallel=layout.tensor)
    request: worker_pb2.ConfigureRequest = Deployment(settings).set_up("", description).request
    return request
