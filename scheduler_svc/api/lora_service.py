"""LoRA adapters of the settings and of clients: loaded, and awaited."""

import asyncio
from collections.abc import Callable, Sequence

from protos.errors import InvalidArgument, TriptychError, Unsupported
from protos.logs import get_logger
from scheduler_svc.adapters.adapter import Adapter
from scheduler_svc.adapters.modules import check_name, name_and_path
from scheduler_svc.workers.deployment import Deployment

# How long after a failure that may pass an adapter of the settings is tried again.
_RETRY_S = 5.0


class LoraService:
    """Loads adapters; those of the settings when the first replica is ready."""

    def __init__(self, deployment: Deployment, modules: Sequence[str]) -> None:
        """Prepares to load.

        Args:
            deployment: has the replicas.
            modules: the adapters of the settings, each as ``name=path``.
        """
        self._deployment = deployment
        self._modules = dict(name_and_path(module) for module in modules)
        self._task: asyncio.Task[None] | None = None
        self._serving = False
        # Adapters of the settings that have not been tried yet.
        self._untried = set(self._modules)
        self._ready_listeners: list[Callable[[bool], None]] = []
        self._log = get_logger()
        deployment.on_serving(self._on_serving)

    async def load(self, name: str, source: str, *, in_place: bool) -> Adapter:
        """Loads an adapter and returns it once requests can name it.

        Raises:
            InvalidArgument: the name or the adapter is bad, or the name is taken.
            Unsupported: the workers run no adapters.
            TriptychError: the workers cannot load the adapter.
        """
        check_name(name)
        if not source:
            raise InvalidArgument("the adapter's path is empty; send a folder or hub id", param="source")
        outcome: asyncio.Future[Adapter | TriptychError] = asyncio.get_running_loop().create_future()

        def done(result: Adapter | TriptychError) -> None:
            if not outcome.done():  # the caller may be gone
                outcome.set_result(result)

        self._deployment.engine.adapters.load(name, source, in_place=in_place, done=done)
        result = await outcome
        if isinstance(result, TriptychError):
            raise result
        return result

    def replicas_of(self, adapter: Adapter) -> list[str]:
        """Returns the replicas that have an adapter on their host."""
        listed = self._deployment.engine.adapters.listed()
        return next((replicas for one, replicas in listed if one.adapter_id == adapter.adapter_id), [])

    def on_ready(self, listener: Callable[[bool], None]) -> None:
        """Calls `listener` with whether requests can run, the adapters of the settings included.

        An adapter that is refused, or that has to be tried again, keeps nothing else from being served.
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
        """Loads the adapters of the settings, one after the other, and logs refusals."""
        delayed, reasons = dict(self._modules), dict[str, str]()
        while delayed:
            for name, source in list(delayed.items()):
                error = await self._try(name, source)
                if error is None:
                    del delayed[name]
                elif reasons.get(name) != error.message:
                    reasons[name] = error.message
                    self._log.warning("adapter_delayed", name=name, source=source, reason=error.message)
                self._untried.discard(name)
                self._tell()
            if delayed:
                await asyncio.sleep(_RETRY_S)

    async def _try(self, name: str, source: str) -> TriptychError | None:
        """Loads an adapter; returns the error if it may pass."""
        try:
            await self.load(name, source, in_place=False)
        except TriptychError as error:
            if error.retryable:
                return error
            self._deployment.engine.adapters.refuse(name, error)
            if isinstance(error, Unsupported):
                return error  # workers that run adapters may join later
            self._log.error("adapter_refused", name=name, source=source, reason=error.message)
        return None
