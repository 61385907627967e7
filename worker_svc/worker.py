"""A worker without its wire: opens the device and the model, takes a geometry, runs plans. All of it on one thread."""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from protos.errors import ConfigurationRefused, Internal
from protos.logs import get_logger
from worker_svc import loader
from worker_svc.checkpoint import Checkpoint
from worker_svc.devices import Device, DeviceOptions, open_device
from worker_svc.geometry import Geometry, GroupKind, KvGroup, PoolGeometry, group_layers
from worker_svc.memory import Budget, check_weights
from worker_svc.plan import Output, Plan
from worker_svc.pool_runner import PoolRunner
from worker_svc.runner import Runner
from worker_svc.settings import Settings

if TYPE_CHECKING:
    from worker_svc.vllm_adapter.engine import ModelDescription, VllmModel

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
    """

    def __init__(self, settings: Settings) -> None:
        """Does nothing yet: what takes time is in :meth:`prepare` and :meth:`configure`."""
        self._settings = settings
        self._log = get_logger()
        self._model: VllmModel | None = None
        self._runner: Runner | PoolRunner | None = None
        self._loaded = False
        self._asked: Geometry | PoolGeometry | None = None
        self._ready: Ready | None = None
        self.device: Device
        self.folder: Path
        self.groups: tuple[KvGroup, ...] = ()

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
            self._settings.rbln_backend,
            self._settings.rbln_use_custom_kernel,
            self._settings.rbln_moe_use_opt_kernel,
            self._settings.rbln_moe_custom_kernel,
        )
        self.device = open_device(name, options)
        if checkpoint is not None:
            check_weights(checkpoint, settings.dtype, self.device)
        from worker_svc.vllm_adapter import engine

        engine.prepare(self.device)
        imported = time.monotonic()
        self._model = engine.VllmModel(
            self.folder,
            self.device,
            dtype=settings.dtype,
            load_format=settings.load_format,
            seed=settings.seed,
            trust_remote_code=settings.trust_remote_code,
            compiled=settings.backend != "eager",
        )
        window_kind = _WINDOW_KINDS.get(settings.window_kv, self.device.window_kind)
        self.groups = group_layers(self.description.layers, window_kind)
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

        # The old cache goes before the new one comes: both might not fit.
        self._asked, self._ready, self._runner = None, None, None
        model.release_caches()
        if not self._loaded:
            if self._settings.load_format == "dummy":
                progress("load", 0, 0, "made up weights")
            model.load_weights(lambda done, total, what: progress("load", done, total, what))
            self._loaded = True
        lap("load")
        runner: Runner | PoolRunner
        if isinstance(geometry, PoolGeometry):
            assert self.description.pooling is not None
            self._budget(model).fit_pool(geometry)
            runner = PoolRunner(model, self.device, self.description.pooling, geometry)
            bytes_per_block: tuple[int, ...] = ()
        else:
            geometry = self._budget(model).fit(geometry, self.groups)
            progress("allocate", 0, 0, f"KV cache of {' + '.join(map(str, geometry.num_blocks))} blocks")
            runner = Runner(
                model, self.device, self.groups, geometry,
                backend=self._settings.backend, strict=self._settings.compile_strict,
            )  # fmt: skip
            bytes_per_block = runner.cache.bytes_per_block
        lap("allocate")
        if isinstance(runner, Runner):
            runner.make_graphs(lambda done, total, what: progress("compile", done, total, what))
            lap("compile")
        runner.warm_up(lambda done, total, what: progress("warm_up", done, total, what))
        lap("warm_up")
        # What exists now lives as long as the process; collections need not look at it again.
        gc.collect()
        gc.freeze()
        self._runner, self._asked = runner, asked
        self._ready = Ready(geometry, bytes_per_block, seconds)
        return self._ready

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

    def _budget(self, model: "VllmModel") -> Budget:
        settings = self._settings
        recorded = self.device.compiles and settings.backend != "eager"
        return Budget(self.device, model.size, recorded, settings.kv_memory, settings.kv_share)
