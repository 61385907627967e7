"""A worker without its wire: opens the device and the model, takes a geometry, runs plans. All of it on one thread."""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from protos.errors import ConfigurationRefused, Internal
from protos.logs import get_logger
from worker_svc.devices import Device, DeviceOptions, open_device
from worker_svc.execution.memory_budget import Budget, check_weights
from worker_svc.execution.pool_runner import PoolRunner
from worker_svc.execution.runner import Runner
from worker_svc.grammars.compiler import GrammarCompiler, can_constrain
from worker_svc.grammars.constraints import Constraints
from worker_svc.grammars.lowering.limits import CompilerLimits
from worker_svc.graphs.compile_cache import CompileCache
from worker_svc.graphs.fingerprint import code_fields
from worker_svc.graphs.graphs import GENERATED, GraphOptions
from worker_svc.graphs.precompiled import CompiledCode
from worker_svc.model_files import loader
from worker_svc.model_files.checkpoint import Checkpoint
from worker_svc.plans.geometry import Geometry, GroupKind, KvGroup, PoolGeometry, group_layers
from worker_svc.plans.step_plan import Output, Plan
from worker_svc.sampling.state import SamplingVocabulary
from worker_svc.settings import Settings

if TYPE_CHECKING:
    from worker_svc.vllm_adapter.description import ModelDescription
    from worker_svc.vllm_adapter.engine import VllmModel

Phase = Literal["load", "allocate", "compile", "warm_up"]
Progress = Callable[[Phase, int, int, str], None]
"""Told of a phase, its units done, its units in total (0: unknown) and what is being done."""

_WINDOW_KINDS = {"paged": GroupKind.PAGED_WINDOW, "in-place": GroupKind.IN_PLACE_WINDOW}


@dataclass(frozen=True)
class Ready:
    """What a configured worker runs with."""

    geometry: Geometry | PoolGeometry
    """With ``num_blocks`` set."""
    bytes_per_block: tuple[int, ...]
    """Per KV group, over all of its layers; a pooling model has none."""
    phase_seconds: Mapping[Phase, float]


class Worker:
    """One model on one device.

    Attributes:
        device: set by :meth:`prepare`.
        folder: the model's files; set by :meth:`prepare`.
        groups: the model's KV groups; set by :meth:`prepare`.
        grammars: compiles what outputs must match, on threads of its own; set by :meth:`prepare`, ``None`` if this model's cannot be matched.
    """

    def __init__(self, settings: Settings) -> None:
        """Does nothing yet: what takes time is in :meth:`prepare` and :meth:`configure`."""
        self._settings = settings
        self._log = get_logger()
        self._model: VllmModel | None = None
        self._runner: Runner | PoolRunner | None = None
        self._loaded = False
        self._code: CompiledCode | None = None
        self._has_compiled = False
        self._asked: Geometry | PoolGeometry | None = None
        self._ready: Ready | None = None
        self.grammars: GrammarCompiler | None = None
        self.device: Device
        self.folder: Path
        self.groups: tuple[KvGroup, ...] = ()

    @property
    def code_folder(self) -> Path | None:
        """Where the compiled code is that :meth:`configure` found or made; ``None`` if there is none."""
        return None if self._code is None else self._code.folder

    @property
    def num_compiled(self) -> int:
        """What a compiler was called for: pieces of steps, or whole steps."""
        return self._runner.graphs.num_compiled if isinstance(self._runner, Runner) else 0

    @property
    def description(self) -> "ModelDescription":
        """What the model is.

        Raises:
            Internal: before :meth:`prepare`.
        """
        if self._model is None:
            raise Internal("the worker is not prepared yet")
        return self._model.description

    def prepare(self) -> None:
        """Opens the device and the model's configuration; no weights. Takes the seconds that importing takes.

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
        # Told now rather than after the seconds that come.
        checkpoint = None if settings.load_format == "dummy" else Checkpoint.open(self.folder)
        import torch

        if self._settings.cpu_threads is not None:
            torch.set_num_threads(self._settings.cpu_threads)
        name = self._settings.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        options = DeviceOptions(
            rbln_backend=self._settings.rbln_backend,
            rbln_use_custom_kernel=self._settings.rbln_use_custom_kernel,
            compile_only=self._settings.compile_only,
            compile_strict=self._settings.compile_strict,
            rbln_moe_use_opt_kernel=self._settings.rbln_moe_use_opt_kernel,
            rbln_moe_custom_kernel=self._settings.rbln_moe_custom_kernel,
        )
        self.device = open_device(name, options)
        if checkpoint is not None:
            check_weights(checkpoint, settings.dtype, self.device)
        from worker_svc.vllm_adapter import engine, startup

        startup.prepare(self.device)
        imported = time.monotonic()
        self._model = engine.VllmModel(
            self.folder,
            self.device,
            dtype=settings.dtype,
            load_format=settings.load_format,
            seed=settings.seed,
            trust_remote_code=settings.trust_remote_code,
            compiled=self._level() > 0,
        )
        window_kind = _WINDOW_KINDS.get(settings.window_kv, self.device.window_kind)
        self.groups = group_layers(self.description.layers, window_kind)
        self.grammars = self._grammar_compiler()
        self._log.info(
            "prepared", model=loader.display_name(settings.model), architecture=self.description.architecture,
            device=self.device.name, device_name=self.device.product_name(),
            import_s=round(imported - started, 2), build_s=round(time.monotonic() - imported, 2),
        )  # fmt: skip

    def is_configured_as(self, geometry: Geometry | PoolGeometry) -> bool:
        """Whether :meth:`configure` with this geometry would change nothing."""
        return self._ready is not None and geometry == self._asked

    def configure(self, geometry: Geometry | PoolGeometry, progress: Progress) -> Ready:
        """Loads, allocates and warms up; the same geometry again changes nothing.

        Raises:
            ConfigurationRefused: if the geometry or the weights do not suit the device; the worker can be configured again.
        """
        if self._ready is not None and self.is_configured_as(geometry):
            return self._ready
        asked = geometry
        model = self._model
        if model is None:
            raise Internal("the worker is not prepared yet")
        geometry = self._checked(geometry)
        seconds: dict[Phase, float] = {}
        clock = time.monotonic()

        def lap(phase: Phase) -> None:
            nonlocal clock
            now = time.monotonic()
            seconds[phase] = now - clock
            clock = now

        self._release(model)
        runner: Runner | PoolRunner | None = None
        try:
            if isinstance(geometry, PoolGeometry):
                assert self.description.pooling is not None
                self._load_once(model, progress)
                lap("load")
                self._budget(model).fit_pool(geometry)
                runner = PoolRunner(model, self.device, self.description.pooling, geometry)
            else:
                if self.device.caches_are_inputs and not geometry.num_blocks:
                    geometry = self._budget(model).fit(geometry, self.groups)
                self._code = self._find_code(geometry)
                self._load_once(model, progress)
                lap("load")
                geometry = self._budget(model).fit(geometry, self.groups)
                progress("allocate", 0, 0, f"KV cache of {' + '.join(map(str, geometry.num_blocks))} blocks")
                runner = Runner(
                    model,
                    self.device,
                    self.groups,
                    geometry,
                    vocabulary=SamplingVocabulary(
                        self.description.vocab_size, self.description.eos_token_ids
                    ),
                    options=self._graph_options(),
                    constraints=self._constraints(geometry),
                )
            lap("allocate")
            self._make_ready(runner, progress, lap)
        except BaseException:
            self._runner = runner
            self._release(model)
            raise
        # What exists now mostly lives as long as the process; collections need not look at it again.
        gc.collect()
        gc.freeze()
        self._runner, self._asked = runner, asked
        bytes_per_block = runner.cache.bytes_per_block if isinstance(runner, Runner) else ()
        self._ready = Ready(geometry, bytes_per_block, seconds)
        return self._ready

    def _release(self, model: "VllmModel") -> None:
        """Lets go of what an earlier configuration made: the old cache goes before the new one comes, as both might not fit."""
        if isinstance(self._runner, Runner):
            self._runner.close()
        if self._code is not None:
            self._code.discard()
        self._asked, self._ready, self._runner, self._code = None, None, None, None
        model.release_caches()
        self.device.release_unused()

    def _load_once(self, model: "VllmModel", progress: Progress) -> None:
        if self._loaded:
            return
        if self._settings.load_format == "dummy":
            progress("load", 0, 0, "made up weights")
        model.load_weights(lambda done, total, what: progress("load", done, total, what))
        self._loaded = True

    def _make_ready(
        self, runner: Runner | PoolRunner, progress: Progress, lap: Callable[[Phase], None]
    ) -> None:
        """Makes every graph and runs it once, unless that is left to the first requests."""
        started = time.monotonic()
        code = self._code
        if code is not None:
            code.use()
            self.device.use_code_folder(code.folder)
        if self._settings.enable_warm_up:
            if isinstance(runner, Runner):
                runner.make_graphs(lambda done, total, what: progress("compile", done, total, what))
                lap("compile")
            runner.warm_up(lambda done, total, what: progress("warm_up", done, total, what))
            lap("warm_up")
        if not isinstance(runner, Runner):
            return
        runner.graphs.finish()
        if code is not None and self._settings.enable_warm_up:
            if self._has_compiled and not code.is_warm:
                # What this process has compiled before is in its memory, not in the new folder: the entry would have holes.
                self._log.info("compiled_code_not_kept", reason="this process was configured before")
                code.discard()
            else:
                code.keep([str(each) for each in runner.signatures()], time.monotonic() - started)
            self.device.use_code_folder(None)
        self._has_compiled |= code is not None

    def _level(self) -> int:
        """Of optimization.

        Raises:
            ConfigurationRefused: if the device has no such level.
        """
        level = self._settings.level_for(self.device.default_level)
        if level > self.device.highest_level:
            raise ConfigurationRefused(
                f"-O {level} generates kernels, and device {self.device.name} has a compiler of its own; use -O 1 or leave it away"
            )
        return level

    def _graph_options(self) -> GraphOptions:
        settings = self._settings
        config = settings.compilation_config
        return GraphOptions(
            level=self._level(),
            sizes=config.candidate_compile_sizes if config else None,
            required=settings.backend == "compiled",
            strict=settings.compile_strict,
        )

    def _find_code(self, geometry: Geometry) -> CompiledCode | None:
        """The compiled code of a configuration; ``None`` if it has none.

        Raises:
            ConfigurationRefused: if it is to be precompiled and is not.
        """
        options, settings = self._graph_options(), self._settings
        if options.level < GENERATED and not (self.device.has_own_compiler and options.level):
            if settings.require_precompiled:
                self._log.info("nothing_to_precompile", level=options.level)
            return None
        folder = settings.cache_folder(self.device.name)
        fields = code_fields(
            self.folder,
            device=self.device,
            level=options.level,
            dtype=str(self.description.dtype).removeprefix("torch."),
            quantization=self.description.quantization,
            groups=self.groups,
            geometry=geometry,
            sizes=options.sizes,
            made_up=settings.seed if settings.load_format == "dummy" else None,
        )
        cache = CompileCache(folder) if folder else None
        return CompiledCode(cache, fields, required=settings.require_precompiled)

    def _checked(self, geometry: Geometry | PoolGeometry) -> Geometry | PoolGeometry:
        """The geometry, complete but for counted blocks.

        Raises:
            ConfigurationRefused: if the model or the device cannot run it.
        """
        description = self.description
        if isinstance(geometry, PoolGeometry) != (description.pooling is not None):
            shapes = "pool_shapes" if description.pooling else "a chunk and decode buckets"
            raise ConfigurationRefused(f"{description.architecture} is to be configured with {shapes}")
        if isinstance(geometry, PoolGeometry):
            geometry.check(longest_context=description.max_model_len)
            return geometry
        if len(geometry.num_blocks) == 1:  # one number for all groups
            geometry = replace(geometry, num_blocks=geometry.num_blocks * len(self.groups))
        geometry.check(
            self.groups,
            block_size_multiple=self.device.block_size_multiple,
            longest_context=description.max_model_len,
        )
        return geometry

    def execute(self, plan: Plan) -> list[Output]:
        """Runs one step; see ``Runner.execute``.

        Raises:
            Internal: if the worker is not configured, or the plan contradicts earlier ones.
        """
        if self._runner is None:
            raise Internal("the worker is not configured")
        return self._runner.execute(plan)

    def reset(self) -> None:
        """Frees every slot."""
        if self._runner is not None:
            self._runner.reset()

    def _grammar_compiler(self) -> GrammarCompiler | None:
        description, settings = self.description, self._settings
        if description.pooling is not None or not can_constrain(self.folder, description.eos_token_ids):
            return None
        limits = CompilerLimits(
            threads=settings.grammar_threads,
            cpu_s=settings.grammar_time_s,
            memory=settings.grammar_memory_mib << 20,
            cache=settings.grammar_cache_mib << 20,
        )
        return GrammarCompiler(self.folder, description.vocab_size, description.eos_token_ids, limits)

    def _constraints(self, geometry: Geometry) -> Constraints | None:
        if self.grammars is None:
            return None
        return Constraints(
            self.grammars,
            num_slots=geometry.max_num_seqs,
            most_rows=geometry.decode_buckets[-1],
            vocab_size=self.description.vocab_size,
            end_ids=self.description.eos_token_ids,
            device=self.device.torch_device,
            least_jump=self._settings.jump_ahead_tokens if self.device.chunks_start_anywhere else 0,
        )

    def _budget(self, model: "VllmModel") -> Budget:
        settings = self._settings
        recorded = self._level() > 0 and not self.device.has_own_compiler
        return Budget(self.device, model.size, recorded, settings.kv_memory, settings.kv_share)
