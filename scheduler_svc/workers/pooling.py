"""Replicas of a pooling model: their static shapes and scheduler."""

from collections.abc import Callable
from functools import partial

from protos.service.settings import Group
from protos.step_messages import shape_to_proto
from protos.steps import PoolShape
from protos.validation import TOKEN_TASKS
from scheduler_svc.pooling.engine import PoolEngine, PoolReplica
from scheduler_svc.pooling.scheduler import PoolScheduler
from scheduler_svc.pooling.tasks import MOST_VALUES, PooledModel
from scheduler_svc.settings import Settings
from scheduler_svc.shapes.pool_shapes import shapes_of
from scheduler_svc.workers.descriptions import WorkerDescription, configure_pool_to_proto
from scheduler_svc.workers.engine_protocol import ReplicaSetup, WorkerLink
from scheduler_svc.workers.generating import make_order, warn_of_ignored

_IGNORED_SETTINGS = ("max_model_len", *Settings.groups[Group.BATCHING], *Settings.groups[Group.KV_MEMORY])


class PoolingReplicas:
    """The :class:`ReplicaFactory` of pooling models."""

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        """Starts with an empty engine; `clock` gives monotonic seconds."""
        self._settings = settings
        self.engine = PoolEngine(
            max_waiting=settings.max_waiting_requests,
            max_waiting_tokens=settings.max_waiting_tokens,
            clock=clock,
            make_order=lambda: make_order(settings),
            max_worker_losses=settings.max_worker_losses,
            max_step_failures=settings.max_step_failures,
        )

    def set_up(self, replica_id: str, description: WorkerDescription) -> ReplicaSetup:
        """Chooses the static shapes of a worker.

        Raises:
            ConfigurationRefused: the model or the device cannot run the shapes of the settings or of the
                other replicas.
        """
        settings = self._settings
        warn_of_ignored(settings, _IGNORED_SETTINGS, "pooling models run in pool shapes")
        shapes = self.engine.shapes
        limits, model = description.limits, description.model
        room = MOST_VALUES // model.pooled_size if model.pool_tasks & TOKEN_TASKS else None
        chosen = shapes_of(
            settings.pool_batch_sizes, settings.pool_prompt_lens, fixed=shapes, max_context=limits.max_context, max_batch=limits.max_batch, max_tokens=room,
            packs_texts=description.packs_texts,
        )  # fmt: skip
        del model.message.pooling.shapes[:]
        model.message.pooling.shapes.extend(map(shape_to_proto, chosen))
        return ReplicaSetup(
            request=configure_pool_to_proto(chosen),
            max_model_len=chosen[-1].prompt_len,
            facts={"shapes": [str(shape) for shape in chosen]},
            attach=partial(self._attach, replica_id, chosen),
        )

    def _attach(
        self,
        replica_id: str,
        shapes: tuple[PoolShape, ...],
        description: WorkerDescription,
        num_blocks: tuple[int, ...],
        served_name: str,
        link: WorkerLink,
    ) -> PoolScheduler:
        del num_blocks, served_name  # no KV memory, no histogram
        model = description.model
        pooled = PooledModel(model.vocab_size, model.pool_tasks, model.pooled_size, model.message.pooling)
        # Texts are packed where a step's time grows with its tokens, on CPUs.
        self.engine.serve(pooled, shapes, padding_costs=description.packs_texts)
        scheduler = self.engine.make_scheduler(replica_id, pooled)
        self.engine.attach(replica_id, PoolReplica(scheduler, link.wake, link.failing))
        return scheduler
