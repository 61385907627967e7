"""A worker without its gRPC service: opens device and model, takes a configuration, runs plans."""

import gc
import sys
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from protos.errors import ConfigurationRefused, Internal, Unavailable, Unsupported
from protos.service.logs import get_logger
from protos.steps import GroupKind, SlotOutput, StepPlan
from protos.triptych.v1.worker_pb2 import WorkerReport
from worker_svc.devices import open_device
from worker_svc.devices.base import BlockCopies, ChunkStarts, Device
from worker_svc.execution.engine import Engine
from worker_svc.execution.lockstep import Follower, GiveUp, Leader, rank_facts
from worker_svc.execution.memory_budget import MemoryBudget, check_weights, free_memory
from worker_svc.grammars.compiler import CompilerLimits, GrammarCompiler, can_constrain
from worker_svc.grammars.constraints import (
    Constraints,
    FollowingConstraints,
    LeadingConstraints,
    StepConstraints,
)
from worker_svc.graphs.compilation import Compilation, graph_options
from worker_svc.graphs.graph_runner import INDUCTOR_LEVEL, GraphOptions
from worker_svc.lora.checkpoint import LoraLimits
from worker_svc.lora.store import AdapterStore
from worker_svc.model_files import loader
from worker_svc.model_files.checkpoint import Checkpoint, dummy_digest, start_digest
from worker_svc.pending_step import PendingStep
from worker_svc.phases import Phase, PhaseProgress, Phases
from worker_svc.quantized.checkpoint_config import read as read_quantization
from worker_svc.ranks.group import RankGroup
from worker_svc.settings import Settings
from worker_svc.shapes import KvGroup, ModelDescription, ShapeConfig, Shapes, group_layers
from worker_svc.vllm_settings import default_sampling

if TYPE_CHECKING:
    from worker_svc.vllm_adapter.model import VllmModel

_WINDOW_KINDS = {"paged": GroupKind.PAGED_WINDOW, "in-place": GroupKind.IN_PLACE_WINDOW}


@dataclass(frozen=True)
class Ready:
    """The configuration of a worker in service."""

    shapes: Shapes
    """The sizes, with `num_blocks` set."""
    bytes_per_block: tuple[int, ...]
    """Bytes of a block of each KV group, over all of its layers; empty for a pooling model."""
    phase_seconds: Mapping[Phase, float]
    """Duration of each phase of the configuration."""
    weights_digest: str
    """Equal for workers with the same weights; see `checkpoint.start_digest`."""
    block_copies: BlockCopies
    """How the device copies blocks."""
    chunk_starts: ChunkStarts = "whole"
    """Where chunks may begin."""


class Worker:
    """A model on a device. All calls come from the same thread."""

    device: Device
    """Set by `prepare`."""
    folder: Path
    """The model's files; set by `prepare`."""
    groups: tuple[KvGroup, ...]
    """The model's KV groups; set by `prepare`."""
    grammars: GrammarCompiler | None
    """Compiles grammars on its own threads; `None` before `prepare` and for models without support."""

    def __init__(self, settings: Settings, give_up: GiveUp = sys.exit) -> None:
        """Opens nothing yet. `give_up` ends a process that cannot go on."""
        self._settings = settings
        self.layout = settings.layout
        """This process' rank."""
        self._give_up = give_up
        # Whether joining or a configuration failed, perhaps on this rank only: others may wait for it.
        self._is_apart = False
        self.epoch = ""
        """The group of ranks of this process, from the moment it joins; empty if none."""
        self._group: RankGroup | None = None
        self._leader: Leader | None = None
        self.follower: Follower | None = None
        """Runs the announcements of rank 0; set on the other ranks once they are configured."""
        self._log = get_logger()
        self._model: VllmModel | None = None
        self._engine: Engine | None = None
        self._loaded = False
        self._digest: Future[str] = Future()
        # The matchers of this rank, for their times.
        self._own_constraints: Constraints | None = None
        self._requested: Shapes | None = None
        self._ready: Ready | None = None
        self.default_sampling: Mapping[str, float] = {}
        """The sampling parameters of requests that omit them; set by `prepare`."""
        self.adapters: AdapterStore | None = None
        """The LoRA adapters; `None` before `prepare` and without `--enable-lora`."""
        self.packs_texts = False
        """Whether pooling shapes may be packed, with many graphs; set by `prepare`."""
        self.grammars = None
        self.groups = ()

    @property
    def code_folder(self) -> Path | None:
        """The folder of the compiled code in use, if there is any."""
        return None if self._engine is None else self._engine.code_folder

    @property
    def num_compiled(self) -> int:
        """Compiler runs in the last `configure`."""
        return 0 if self._engine is None else self._engine.num_compiled

    def report(self) -> WorkerReport:
        """Returns the counters since the configuration. Safe on any thread."""
        return WorkerReport(
            late_graphs=0 if self._engine is None else self._engine.num_late,
            grammar_us=round(self._own_constraints.seconds * 1e6) if self._own_constraints else 0,
            free_memory_bytes=free_memory(self.device) or 0,
            process_memory_bytes=psutil.Process().memory_info().rss,
            adapter_placements=0 if self.adapters is None else self.adapters.num_placements,
        )

    @property
    def description(self) -> ModelDescription:
        """The model's description.

        Raises:
            Internal: before `prepare`.
        """
        if self._model is None:
            raise Internal("the worker is not prepared yet")
        return self._model.description

    def prepare(self) -> None:
        """Opens the device and reads the model's configuration, without weights. Imports take seconds.

        Raises:
            ConfigurationRefused: if a setting cannot be met, in one line.
        """
        started = time.monotonic()
        settings = self._settings
        self.folder = loader.resolve(
            settings.model,
            settings.revision,
            load_format=settings.load_format,
            trust_remote_code=settings.trust_remote_code,
        )
        # Damaged or oversized weights and unserved quantizations are refused before the slow imports.
        read_quantization(self.folder)
        checkpoint = None if settings.load_format == "dummy" else Checkpoint.open(self.folder)
        self.device = open_device(settings.device, settings.device_options)
        if checkpoint is not None:
            check_weights(checkpoint, settings.dtype, self.device, ranks=self.layout.world_size)
            self._digest = start_digest([shard.path for shard in checkpoint.shards], settings.digest_folder)
        else:
            self._digest.set_result(dummy_digest(settings.seed, self.device.name))
        options = graph_options(settings, self.device)
        self.packs_texts = self.device.packs_texts and options.level < INDUCTOR_LEVEL
        from worker_svc.vllm_adapter import startup
        from worker_svc.vllm_adapter.model import VllmModel

        startup.prepare(self.device.name)
        imported = time.monotonic()
        self._model = VllmModel(
            self.folder,
            self.device,
            dtype=settings.dtype,
            seed=settings.seed,
            dummy_weights=settings.load_format == "dummy",
            trust_remote_code=settings.trust_remote_code,
            language_model_only=settings.language_model_only,
            compiled=options.level > 0,
            layout=self.layout,
            pooling_task=None if settings.pooling_task == "auto" else settings.pooling_task,
            lora=self._lora_limits(),
        )
        self.default_sampling = default_sampling(
            self.description.default_sampling, settings.generation_config, settings.override_generation_config
        )
        if self._model.adapted is not None:
            self.adapters = AdapterStore(self._model.adapted.limits, self._model.adapted)
        window_kind = _WINDOW_KINDS.get(settings.window_kv, self.device.window_kind)
        self.groups = group_layers(self.description.layers, window_kind)
        self.grammars = self._grammar_compiler()
        self._engine = self._open_engine(self._model, options)
        self._log.info(
            "prepared", model=loader.display_name(settings.model), architecture=self.description.architecture,
            device=self.device.name, device_name=self.device.product_name(),
            import_s=round(imported - started, 2), build_s=round(time.monotonic() - imported, 2),
        )  # fmt: skip

    def is_configured_as(self, shapes: Shapes) -> bool:
        """Whether the worker runs with these shapes already."""
        return self._ready is not None and shapes == self._requested

    def check(self, shapes: Shapes) -> None:
        """Makes the checks of `configure` that need no weights. Changes nothing.

        Raises:
            ConfigurationRefused: if the shapes do not suit the model or the device.
        """
        assert self._engine is not None, "the worker is prepared"
        self._engine.check_start(self._engine.check(shapes))

    def configure(self, shapes: Shapes, progress: PhaseProgress, *, epoch: str = "") -> Ready:
        """Loads the weights, allocates memory and warms up. The same shapes again change nothing.

        Args:
            shapes: the static shapes.
            progress: receives the progress of each phase.
            epoch: the group to join in a replica of several ranks, all configured at the same time.

        Raises:
            ConfigurationRefused: if shapes or weights do not suit the device. Another try may follow.
            Unavailable: if the ranks do not meet, this process belongs to another group, or rank 0 has not
                begun this configuration yet.
        """
        self.join(epoch)
        if self.adapters is not None:
            self.adapters.forget()  # this may be another scheduler, with ids of its own
        if self._ready is not None and self.is_configured_as(shapes):
            return self._ready
        engine, phases = self._engine, Phases(progress)
        if engine is None:
            raise Internal("the worker is not prepared yet")
        checked = engine.check(shapes)
        if self._leader is not None:
            self._leader.begin()
        if self.follower is not None:
            self.follower.begin()
        # The old cache must go first: both may not fit.
        self._release(engine)
        try:
            started = engine.start(checked, lambda: self._load_once(phases), phases)
        except BaseException as error:
            self._release(engine)
            # All ranks raise Unavailable, or none.
            self._is_apart = not isinstance(error, Unavailable)
            raise
        # Most live objects stay as long as the process; later collections can skip them.
        gc.collect()
        gc.freeze()
        self._requested = shapes
        self._ready = Ready(
            started,
            engine.bytes_per_block,
            phases.seconds,
            self._digest.result(),
            self.device.block_copies(self.groups),
            engine.chunk_starts,
        )
        return self._ready

    def launch(self, plan: StepPlan) -> PendingStep:
        """Hands a step to the device; see `Engine.launch`.

        Raises:
            Internal: if the worker is not configured, or the plan contradicts earlier plans.
        """
        if self._engine is None or self._ready is None:
            raise Internal("the worker is not configured")
        return (self._leader or self._engine).launch(plan)

    def execute(self, plan: StepPlan) -> list[SlotOutput]:
        """Launches a step and waits for its outputs; see `PendingStep.wait`."""
        return self.launch(plan).wait()

    def reset(self) -> None:
        """Frees every slot."""
        steps = self._leader or self._engine
        if steps is not None:
            steps.reset()

    def reserve_adapter(self, adapter_id: int, needed: Collection[int]) -> list[int]:
        """Makes room on the host for an adapter before its read; returns the evicted adapters.

        Only rank 0 evicts, and announces it to the other ranks.

        Raises:
            Overloaded: if all others on the host are `needed`.
            Unsupported: without `--enable-lora`.
        """
        if self.adapters is None:
            raise Unsupported("this worker serves no LoRA adapters; start it with --enable-lora")
        displaced = self.adapters.displaced(needed) if self.follower is None else []
        for each in displaced:
            self.unload_adapter(each)
        self.adapters.reserve(adapter_id)
        return displaced

    def unload_adapter(self, adapter_id: int) -> None:
        """Frees an adapter on this rank's host, and after earlier plans on the other ranks'."""
        if self._leader is not None:
            self._leader.unload(adapter_id)
        self._unload(adapter_id)

    def _unload(self, adapter_id: int) -> None:
        if self.adapters is not None:
            self.adapters.unload(adapter_id)

    def close(self) -> None:
        """Stops compiling grammars."""
        if self.grammars is not None:
            self.grammars.close()

    def join(self, epoch: str) -> None:
        """Joins the group of the replica's ranks, once in the process' life. A replica of one needs none.

        Raises:
            ConfigurationRefused: if the scheduler does not name a group, or the ranks differ.
            Unavailable: if the ranks do not meet, or this process belongs to another group.
        """
        if self.layout.world_size == 1:
            return
        engine = self._engine
        if not epoch:
            raise ConfigurationRefused(
                f"this worker is {self.layout}, but it is configured alone; register all ranks of the replica"
            )
        if self._is_apart and self._settings.master:
            self._give_up(
                "an earlier configuration failed on this rank, and other ranks may still wait in it"
            )
            raise Unavailable("this rank ends after a failed configuration; retry once it is back")
        assert engine is not None, "the worker is prepared"
        if not self.epoch:
            if self._settings.master:
                self.device.prepare_ranks(self._settings.master)
            self.epoch, self._is_apart = epoch, True
            self._group = RankGroup(
                self.layout,
                self.device.states_device,
                master=self._settings.master,
                epoch=epoch,
                default=self.device.default_collectives,
                collectives=self.device.collectives,
                compiled=self.device.has_own_compiler,
                identity=self.device.identity(),
                facts=rank_facts(self._settings, self.device, str(self.description.dtype)),
            )
            self._is_apart = False
            self.device.use_ranks(self._group.stage)
            engine.group = self._group
            if not self._settings.master:
                return  # nothing to lead or to follow
            if self.layout.leads:
                self._leader = Leader(engine, self._group, self._give_up)
            else:
                self.follower = Follower(
                    engine, self._group, self._give_up, lambda: self._release(engine), self._unload
                )
        elif self.epoch != epoch or self._group is None:
            self._give_up("the replica's ranks have formed another group since this one was lost")
            raise Unavailable("this rank belongs to an earlier group and ends; retry once it is back")

    def _release(self, engine: Engine) -> None:
        """Drops the current configuration."""
        self._requested, self._ready = None, None
        engine.release()
        assert self._model is not None
        self._model.release_caches()
        self.device.release_unused()

    def _load_once(self, phases: Phases) -> None:
        """Loads the weights in the first configuration only."""
        if self._loaded:
            return
        assert self._model is not None
        progress = phases.progress("load")
        if self._settings.load_format == "dummy":
            progress(0, 0, "made up weights")
        self._model.load_weights(progress)
        self._loaded = True

    def _open_engine(self, model: "VllmModel", options: GraphOptions) -> Engine:
        settings, device = self._settings, self.device
        recorded = options.level > 0 and not device.has_own_compiler
        budget = MemoryBudget(
            device, model.size, recorded, settings.kv_memory_on(device.name), settings.kv_share
        )
        compilation = Compilation(
            settings, device, options, folder=self.folder, description=self.description, groups=self.groups
        )
        return Engine(
            model,
            device,
            self.description,
            self.groups,
            budget=budget,
            compilation=compilation,
            options=options,
            constraints=self._constraints,
            layout=self.layout,
            adapters=self.adapters,
        )

    def _lora_limits(self) -> LoraLimits | None:
        settings = self._settings
        if not settings.enable_lora:
            return None
        return LoraLimits(
            max_loras=settings.max_loras,
            max_rank=settings.max_lora_rank,
            max_cpu_loras=settings.max_cpu_loras or 2 * settings.max_loras,
            dtype=settings.lora_dtype,
        )

    def _grammar_compiler(self) -> GrammarCompiler | None:
        description, settings = self.description, self._settings
        if description.pooling is not None or not can_constrain(self.folder, description.eos_token_ids):
            return None
        limits = CompilerLimits(
            threads=settings.grammar_threads,
            cpu_s=settings.grammar_time_s,
            compile_bytes=settings.grammar_memory_mib << 20,
            cache_bytes=settings.grammar_cache_mib << 20,
        )
        return GrammarCompiler(self.folder, description.vocab_size, description.eos_token_ids, limits)

    def _constraints(self, shapes: ShapeConfig) -> StepConstraints | None:
        group = self._group
        if self.grammars is None:
            return None
        if group is not None and not group.layout.chooses:
            return FollowingConstraints(group.choices)
        own = Constraints(
            self.grammars,
            num_slots=shapes.max_num_seqs,
            max_rows=shapes.decode_buckets[-1],
            vocab_size=self.description.vocab_size,
            end_ids=self.description.eos_token_ids,
            device=self.device.torch_device,
            min_jump=self._settings.jump_ahead_tokens if self.device.chunks_start_anywhere else 0,
        )
        self._own_constraints = own
        if group is None:
            return own
        return LeadingConstraints(own, group.choices, has_peers=self.layout.tensor > 1)
