"""The served model and its tokenizer, kept current while the gateway runs."""

import asyncio
import functools
import hashlib
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gateway import VERSION
from gateway.http.errors import UnknownModel, internal
from gateway.scheduler_client.client import InferenceClient
from gateway.text.tokenization import TextCodec
from protos.errors import ConfigurationRefused, TriptychError, Unavailable, Unsupported
from protos.limits import MAX_NAME_BYTES
from protos.service.logs import get_logger
from protos.step_messages import shape_from_proto
from protos.steps import format_shapes
from protos.triptych.v1 import common_pb2 as pb

# Poll interval while no model is known: the first request after a replica becomes ready should not wait long.
_FIRST_POLL_S: Final = 0.25

_ROUTES: Final = {
    pb.POOL_TASK_EMBED: "/v1/embeddings",
    pb.POOL_TASK_CLASSIFY: "/classify",
    pb.POOL_TASK_SCORE: "/score",
}


@dataclass(frozen=True)
class ServedModel:
    """The model that is served at the moment."""

    model: pb.ModelInfo
    text: TextCodec
    """The model's tokenizer and chat template."""

    @functools.cached_property
    def fingerprint(self) -> str:
        """OpenAI's ``system_fingerprint``; differs wherever answers may, apart from parameters."""
        model = self.model
        facts = (
            VERSION, model.source, model.architecture, model.dtype, model.max_model_len, model.tokenizer_sha256,
        )  # fmt: skip
        return f"fp_{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"

    def unknown(self, name: str) -> UnknownModel:
        """Returns the error of a request for another model."""
        served = self.model.served_name
        return UnknownModel(f"the model '{name}' is not served here; use '{served}'", param="model")

    def has_name(self, name: str) -> bool:
        """Returns whether requests may call the model by this name."""
        return name == self.model.served_name or name in self.model.aliases

    def adapter_of(self, name: str | None) -> str:
        """Returns the name of a request's LoRA adapter; empty for the model itself, also without a name.

        Only the scheduler knows the loaded adapters.

        Raises:
            UnknownModel: if that cannot be an adapter's name.
        """
        if name is None or self.has_name(name):
            return ""
        if not name or len(name.encode()) > MAX_NAME_BYTES:
            raise self.unknown(name)
        return name

    def check_generates(self) -> None:
        """Refuses a pooling model."""
        if self.model.pool_tasks:
            raise Unsupported(
                f"'{self.model.served_name}' serves {_names(self.model.pool_tasks)} and does not generate text;"
                f" use {_routes(self.model.pool_tasks)}",
                param="model",
            )

    def check_serves(self, *tasks: "pb.PoolTask.ValueType") -> "pb.PoolTask.ValueType":
        """Returns the first of these tasks served by the model."""
        served = self.model.pool_tasks
        if not served:
            raise Unsupported(
                f"'{self.model.served_name}' generates text and is not a pooling model; use"
                " /v1/chat/completions or /v1/completions",
                param="model",
            )
        found = next((task for task in tasks if task in served), None)
        if found is None:
            raise Unsupported(
                f"'{self.model.served_name}' serves {_names(served)}, not {_names(tasks, ' or ')}; use {_routes(served)}",
                param="model",
            )
        return found

    @property
    def pool_shapes(self) -> str:
        """The shapes of a pooling model as text."""
        return format_shapes(list(map(shape_from_proto, self.model.pooling.shapes)))

    @property
    def longest_input(self) -> int:
        """Tokens of the longest input that fits a shape of a pooling model."""
        shapes = self.model.pooling.shapes
        return max((shape.query_len for shape in shapes), default=self.model.max_model_len)


def _names(tasks: Iterable["pb.PoolTask.ValueType"], between: str = ", ") -> str:
    return between.join(pb.PoolTask.Name(task).removeprefix("POOL_TASK_").lower() for task in tasks)


def _routes(tasks: Iterable["pb.PoolTask.ValueType"]) -> str:
    return " or ".join(dict.fromkeys(_ROUTES.get(task, "/pooling") for task in tasks))


def load_text(folder: Path, template: str | None) -> TextCodec:
    """Loads a model's tokenizer and chat template.

    Raises:
        ConfigurationRefused: the files cannot be used, and a retry would not help.
    """
    try:
        return TextCodec.load(folder, template)
    except TriptychError as error:
        raise ConfigurationRefused(error.message) from error
    except Exception as error:
        unusable = f"the model's tokenizer cannot be used: {type(error).__name__}: {error}"
        raise ConfigurationRefused(unusable) from error


class ServedModelWatcher:
    """Follows the served model.

    Looks the model up after every connect and every few seconds, and loads a changed tokenizer.
    """

    def __init__(
        self,
        client: InferenceClient,
        *,
        poll_s: float,
        template: str | None = None,
        on_unusable: Callable[[TriptychError], None] = lambda _: None,
    ) -> None:
        """Prepares the watcher; :meth:`start` starts it."""
        self._template = template
        self._on_unusable = on_unusable
        self._client = client
        self._poll_s = poll_s
        self._served: ServedModel | None = None
        self._error: TriptychError = Unavailable("no replica has become ready yet")
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._looked_up = asyncio.Event()
        self._log = get_logger()
        client.on_connect(self._wake.set)

    def start(self) -> None:
        """Starts to follow the model."""
        self._task = asyncio.create_task(self._follow(), name="served-model")

    async def close(self) -> None:
        """Stops following the model."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def served(self, model: str | None = None) -> ServedModel:
        """Returns the served model if ``model`` is a name of it or ``None``.

        Raises:
            Unavailable: if no model is known yet.
            UnknownModel: if another model is served.
        """
        if self._served is None:
            # Each `raise` adds to an exception's traceback; this one is raised many times.
            raise self._error.with_traceback(None)
        if model is not None and not self._served.has_name(model):
            raise self._served.unknown(model)
        return self._served

    @property
    def awaits_model(self) -> bool:
        """Whether no replica was ready yet, or no scheduler reached."""
        return self._served is None and isinstance(self._error, Unavailable)

    async def found(self) -> None:
        """Waits while :attr:`awaits_model`."""
        while self.awaits_model:
            await self._looked_up.wait()

    @property
    def model_name(self) -> str:
        """The served name; empty while unknown (for labels)."""
        return self._served.model.served_name if self._served is not None else ""

    @property
    def max_model_len(self) -> int:
        """The longest sequence that is served, tokens; 0 while unknown."""
        return self._served.model.max_model_len if self._served is not None else 0

    async def _follow(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._refresh()
            except TriptychError as error:
                if str(error) != str(self._error):
                    self._log.info(
                        "model not known yet" if self._served is None else "model not confirmed",
                        error=str(error),
                    )
                self._error = error
            except Exception as error:  # noqa: BLE001 - a broken tokenizer file must not end the watch
                self._log.exception("the served model could not be looked up")
                self._error = internal(error)
            self._looked_up.set()
            self._looked_up.clear()
            # Fetching unreadable files again four times a second would not help.
            pause = min(_FIRST_POLL_S, self._poll_s) if self.awaits_model else self._poll_s
            try:
                await asyncio.wait_for(self._wake.wait(), pause)
            except TimeoutError:
                continue

    async def _load(self) -> TextCodec:
        try:
            # The loaded tokenizer is in memory, so the folder is temporary.
            with tempfile.TemporaryDirectory(prefix="triptych-tokenizer-") as folder:
                await self._client.get_tokenizer(Path(folder))
                return await asyncio.to_thread(load_text, Path(folder), self._template)
        except ConfigurationRefused as error:
            if self._served is None:
                self._on_unusable(error)
            raise
        except OSError as error:
            unusable = ConfigurationRefused(f"the model's tokenizer cannot be kept: {error}")
            if self._served is None:
                self._on_unusable(unusable)
            raise unusable from error

    async def _refresh(self) -> None:
        model = await self._client.get_model()
        served = self._served
        if served is not None and served.model == model:
            return
        if served is not None and served.model.tokenizer_sha256 == model.tokenizer_sha256:
            text = served.text
        else:
            text = await self._load()
        self._served = ServedModel(model, text)
        self._log.info(
            "serving",
            model=model.served_name,
            max_model_len=model.max_model_len,
            chat_template=text.chat_template is not None,
            tool_format=_name(text.shown.tool_format, text.shown.tools),
            calls_unreadable=text.shown.reason or None,
            thinking_format=_name(text.shown.thinking_format, text.shown.thinking),
            tokenizer=model.tokenizer_sha256[:12],
        )


def _name(name: str | None, form: object | None) -> str | None:
    return name or ("the template's own" if form is not None else None)
