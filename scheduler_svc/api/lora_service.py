"""Loads of LoRA adapters for clients and from the settings."""

import asyncio
from collections.abc import Callable, Sequence

from protos.errors import TriptychError, Unsupported
from protos.service.logs import get_logger
from scheduler_svc.adapters.registry import Adapter, name_and_path
from scheduler_svc.workers.deployment import Deployment

# Pause before an adapter of the settings is retried after a temporary failure.
_RETRY_S = 5.0


class LoraService:
    """Loads adapters; those of the settings after the first replica is ready."""

    def __init__(self, deployment: Deployment, modules: Sequence[str]) -> None:
        """Prepares to load `modules`, the adapters of the settings, each as ``name=path``."""
        self._deployment = deployment
        self._modules = dict(name_and_path(module) for module in modules)
        self._task: asyncio.Task[None] | None = None
        self._serving = False
        # Adapters of the settings before their first attempt.
        self._untried = set(self._modules)
        self._ready_listeners: list[Callable[[bool], None]] = []
        self._log = get_logger()
        deployment.on_serving(self._on_serving)

    async def load(self, name: str, source: str, *, in_place: bool, expected: bool = False) -> Adapter:
        """Loads an adapter and returns it once requests can name it; see :meth:`AdapterControl.load`.

        Raises:
            TriptychError: the load was refused or failed.
        """
        outcome: asyncio.Future[Adapter | TriptychError] = asyncio.get_running_loop().create_future()

        def done(result: Adapter | TriptychError) -> None:
            if not outcome.done():  # the caller may be gone
                outcome.set_result(result)

        adapters = self._deployment.engine.adapters
        adapters.load(name, source, in_place=in_place, done=done, expected=expected)
        result = await outcome
        if isinstance(result, TriptychError):
            raise result
        return result

    def on_ready(self, listener: Callable[[bool], None]) -> None:
        """Reports to `listener` whether requests can run, including those for adapters of the settings.

        A refused or failed adapter holds nothing else up.
        """
        self._ready_listeners.append(listener)

    def _tell(self) -> None:
        for listener in self._ready_listeners:
            listener(self._serving and not self._untried)

    def _on_serving(self, serving: bool) -> None:
        self._serving = serving
        self._tell()
        if serving and self._modules and self._task is None:
            self._task = asyncio.create_task(self._load_modules(), name="lora-modules")

    async def _load_modules(self) -> None:
        # More concurrent loads than places on the smallest host would be refused.
        places = asyncio.Semaphore(max(1, self._deployment.engine.adapters.smallest_host))
        await asyncio.gather(*(self._load_module(*module, places) for module in self._modules.items()))

    async def _load_module(self, name: str, source: str, places: asyncio.Semaphore) -> None:
        """Retries an adapter of the settings until it is loaded or refused for good."""
        registry, reason = self._deployment.engine.adapters.registry, ""
        while True:
            error = None
            try:
                async with places:
                    await self.load(name, source, in_place=False, expected=True)
            except TriptychError as failure:
                error = failure
            # Workers with LoRA may join later.
            is_final = error is None or not (error.retryable or isinstance(error, Unsupported))
            if error is not None and not error.retryable:
                registry.refuse(name, error, for_good=is_final)
            if error is not None and is_final:
                self._log.error("adapter_refused", name=name, source=source, reason=error.message)
            self._untried.discard(name)
            self._tell()
            if error is None or is_final:
                return
            if reason != error.message:
                reason = error.message
                self._log.warning("adapter_delayed", name=name, source=source, reason=reason)
            await asyncio.sleep(_RETRY_S)
