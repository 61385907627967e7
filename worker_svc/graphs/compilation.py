"""Decides how steps become graphs, and where their compiled code is found and kept."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from protos.errors import ConfigurationRefused
from protos.service.logs import get_logger
from worker_svc.devices.base import Device
from worker_svc.graphs.compile_cache import (
    CompileCache,
    CompiledCode,
    VerificationCache,
    replace_unusable_cache_dirs,
)
from worker_svc.graphs.fingerprint import code_fields
from worker_svc.graphs.graph_runner import INDUCTOR_LEVEL, GraphOptions, GraphRunner, GraphSignature
from worker_svc.graphs.spyre_catalog import SpyreCatalog
from worker_svc.phases import Phases, Progress
from worker_svc.settings import Settings
from worker_svc.shapes import KvGroup, ModelDescription, ShapeConfig, Shapes


def keeps_code(level: int, device: Device) -> bool:
    """Whether a device's graphs of a level consist of compiled code, which a later start can use."""
    return level >= INDUCTOR_LEVEL or (device.has_own_compiler and level > 0)


def graph_options(settings: Settings, device: Device) -> GraphOptions:
    """Returns the graph options of this device and these settings.

    Raises:
        ConfigurationRefused: if the device lacks the requested level.
    """
    level = settings.level_for(device.default_level)
    if level > device.highest_level:
        raise ConfigurationRefused(
            f"-O {level} generates kernels, but device {device.name} has its own compiler;"
            " use -O 1 or omit it"
        )
    config = settings.compilation_config
    return GraphOptions(
        level=level,
        sizes=config.candidate_compile_sizes if config else None,
        required=settings.backend == "compiled",
        strict=settings.compile_strict,
    )


class StepRunner(Protocol):
    """The runner of a model's steps as graphs."""

    graphs: GraphRunner
    """The graphs."""

    def signatures(self) -> Sequence[GraphSignature]:
        """Returns every kind of step in plans."""
        ...

    def make_graphs(self, progress: Progress) -> None:
        """Makes the graph of every signature."""

    def warm_up(self, progress: Progress) -> None:
        """Runs every signature once, on padding only."""


class Compilation:
    """The compiled code of a model in this process."""

    def __init__(
        self,
        settings: Settings,
        device: Device,
        options: GraphOptions,
        *,
        folder: Path,
        description: ModelDescription,
        groups: Sequence[KvGroup],
    ) -> None:
        """Looks up nothing yet; `folder` is the model's."""
        self._settings = settings
        self._device = device
        self._options = options
        self._model_folder = folder
        self._description = description
        self._groups = groups
        self._code: CompiledCode | None = None
        self._spyre_catalog: SpyreCatalog | None = None
        self._has_compiled = False
        self._num_added: int | None = None
        self._log = get_logger()

    @property
    def folder(self) -> Path | None:
        """The folder of the code in use, if there is any."""
        return None if self._code is None else self._code.folder

    def num_compiled(self, graphs: GraphRunner) -> int:
        """Returns how often a compiler ran for these graphs: for subgraphs of steps, or for whole steps.

        A device's own compiler does not report its runs. If its code was found, added files count.
        """
        return graphs.num_compiled if self._num_added is None else self._num_added

    def find(self, shapes: Shapes) -> None:
        """Looks up the code of shapes, before the weights are loaded.

        Raises:
            ConfigurationRefused: if the settings require precompiled code and there is none.
        """
        options, settings = self._options, self._settings
        if not keeps_code(options.level, self._device):
            if settings.require_precompiled:
                self._log.warning("nothing_to_precompile", level=options.level, device=self._device.name)
            return
        folder = settings.cache_folder(self._device.name)
        cache = CompileCache(folder) if folder else None
        if folder and isinstance(shapes, ShapeConfig):
            self._spyre_catalog = SpyreCatalog(folder, settings.model, settings.layout.tensor, shapes)
            for warning in self._spyre_catalog.warnings() if settings.require_precompiled else ():
                self._log.warning(f"[PRECOMPILED_WARN] {warning}")
        self._code = CompiledCode(cache, self._fields(shapes), required=settings.require_precompiled)

    def verification_cache(self, shapes: Shapes) -> VerificationCache:
        """Returns which graphs were compared with the model in earlier starts."""
        if self._device.has_own_compiler or not self._options.level:
            return VerificationCache(None, {})  # nothing is replayed
        return VerificationCache(self._settings.cache_folder(self._device.name), self._fields(shapes))

    def _fields(self, shapes: Shapes) -> dict[str, str]:
        options, settings = self._options, self._settings
        return code_fields(
            self._model_folder,
            device=self._device,
            level=options.level,
            dtype=str(self._description.dtype).removeprefix("torch."),
            quantization=self._description.quantization,
            groups=self._groups,
            shapes=shapes,
            sizes=options.sizes,
            layout=settings.layout,
            pooling=self._description.pooling,
            lora=(
                f"{settings.max_loras} of rank {settings.max_lora_rank} in {settings.lora_dtype}"
                if settings.enable_lora
                else "none"
            ),
            dummy_seed=settings.seed if settings.load_format == "dummy" else None,
        )

    def make_graphs(self, runner: StepRunner, phases: Phases) -> None:
        """Makes and runs every graph, and keeps their code, unless the settings leave that to requests."""
        started = time.monotonic()
        warm_up = self._settings.enable_warm_up
        self.use()
        if warm_up:
            runner.make_graphs(phases.progress("compile"))
            phases.finish("compile")
            runner.warm_up(phases.progress("warm_up"))
            phases.finish("warm_up")
        runner.graphs.finish_warm_up(made_all=warm_up)
        self.keep([str(each) for each in runner.signatures()], time.monotonic() - started)
        if warm_up and self._code is not None and self._code.was_found:
            if compiled := self.num_compiled(runner.graphs):
                self._log.warning("compiled_despite_entry", compiled=compiled)
            else:
                self._log.info("compiled_nothing")

    def use(self) -> None:
        """Makes compilers use the folder of the code, and later a writable folder."""
        replace_unusable_cache_dirs()
        if self._code is not None:
            self._code.activate()
            self._device.use_code_folder(self._code.folder)

    def keep(self, signatures: Sequence[str], seconds: float) -> None:
        """Keeps compiled code if it is complete, with its graphs and the seconds of their making."""
        code = self._code
        if code is None:
            return
        if self._settings.enable_warm_up:
            self._num_added = code.num_added if self._device.has_own_compiler else None
            if self._has_compiled and not code.is_warm:
                # Code from an earlier configuration is in this process' memory and missing from the new
                # folder.
                self._log.info("compiled_code_not_kept", reason="this process was configured before")
                code.discard()
            else:
                code.commit(signatures, seconds)
                if code.is_warm and self._spyre_catalog is not None:
                    self._spyre_catalog.add()
            self._device.use_code_folder(None)
        self._has_compiled = True

    def release(self) -> None:
        """Drops the code in use, and its folder if it is incomplete."""
        if self._code is not None:
            self._code.discard()
            self._code = None
        self._num_added = None
