"""Defers what vLLM imports at its start and a worker does not need: a third of the time.

Nothing is replaced or left out. What is deferred happens when something first uses it:

- vLLM's configuration and its attention import the packages of its server and its engine (parsers, OpenAI's
  types, FastAPI). Names from `ENGINE_ONLY` stand for the real ones, and import them at their first use.
- vLLM imports all of TorchInductor in order to patch it. The patches run when something imports Inductor's
  compiler. They run at once if a variable asks for a patch of something else.
- Some modules of vLLM compile a function when they are imported, which imports Inductor, too. Such a function
  is compiled at its first call.
"""

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

ENGINE_ONLY: Final = ("vllm.reasoning", "vllm.v1.structured_output")
"""Packages of vLLM that only its server and its engine use."""
COMPILER: Final = "torch._inductor.compile_fx"
"""The module through which everything compiles with Inductor."""
_PATCHES: Final = "vllm.env_override"
# What else that module does, if these variables say so.
_OTHER_PATCHES: Final = ("VLLM_TRITON_FORCE_FIRST_CONFIG", "VLLM_ENABLE_CUDA_COMPATIBILITY")


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Defers imports that vLLM makes inside the block. Modules that are imported already stay as they are."""
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
        """Finds the packages and what is in them."""
        del path, target
        if not any(fullname == package or fullname.startswith(f"{package}.") for package in self._packages):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Makes a stand-in."""
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
        """Runs the patches once, before the compiler is imported."""
        del path, target
        if fullname != COMPILER:
            return None
        sys.meta_path.remove(self)
        del sys.modules[_PATCHES]
        importlib.import_module(_PATCHES)
        # The patches may have imported the compiler.
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in sys.modules else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Returns the module that exists."""
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
