"""What is served right now: the model and its text side, kept current while the gateway runs."""

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gateway.http.errors import UnknownModel, internal
from gateway.scheduler_link.client import InferenceClient
from gateway.text.tokenization import TextCodec
from protos.errors import TriptychError, Unavailable, Unsupported
from protos.logs import get_logger
from protos.triptych.v1 import common_pb2 as pb

# How often an unknown model is asked for: the first request after a replica is ready should not wait long.
_IMPATIENT_POLL_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Served:
    """The served model."""

    model: pb.ModelInfo
    text: TextCodec

    def check_generates(self) -> None:
        """Refuses what only a model that generates text can serve.

        Raises:
            Unsupported: for a pooling model.
        """
        if self.model.pool_tasks:
            raise Unsupported(
                f"'{self.model.served_name}' makes embeddings and generates no text; use /v1/embeddings",
                param="model",
            )

    def check_embeds(self) -> None:
        """Refuses what only a model for embeddings can serve.

        Raises:
            Unsupported: for another model.
        """
        if pb.POOL_TASK_EMBED not in self.model.pool_tasks:
            raise Unsupported(
                f"'{self.model.served_name}' generates text and makes no embeddings; use /v1/chat/completions or"
                " /v1/completions",
                param="model",
            )


class ServedModelWatcher:
    """Follows the served model: looks it up again after every connect and every few seconds, and reloads a tokenizer that changed."""

    def __init__(
        self, client: InferenceClient, *, poll_s: float, prepare: Callable[[TextCodec], None] = lambda _: None
    ) -> None:
        """Follows what ``client`` is told.

        Args:
            client: the line to the scheduler.
            poll_s: how often to look, seconds.
            prepare: what else is to be made of a model's text side before it is used; may take seconds.
        """
        self._client = client
        self._prepare = prepare
        self._poll_s = poll_s
        self._served: Served | None = None
        self._trouble: TriptychError = Unavailable("no replica has become ready yet")
        self._task: asyncio.Task[None] | None = None
        self._poke = asyncio.Event()
        self._log = get_logger()
        client.on_connect(self._poke.set)

    def start(self) -> None:
        """Starts to follow."""
        self._task = asyncio.create_task(self._follow(), name="served-model")

    async def close(self) -> None:
        """Stops to follow."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def served(self, model: str | None = None) -> Served:
        """What is served, if ``model`` is its name (or not given).

        Raises:
            Unavailable: while nothing is known yet.
            UnknownModel: if another model is served.
        """
        if self._served is None:
            raise self._trouble
        name = self._served.model.served_name
        if model is not None and model != name:
            raise UnknownModel(f"the model '{model}' is not served here; use '{name}'", param="model")
        return self._served

    @property
    def model_name(self) -> str:
        """The served name, empty while unknown (for labels)."""
        return self._served.model.served_name if self._served is not None else ""

    async def _follow(self) -> None:
        while True:
            self._poke.clear()
            try:
                await self._refresh()
            except TriptychError as error:
                if str(error) != str(self._trouble):
                    self._log.info(
                        "model not known yet" if self._served is None else "model not confirmed",
                        error=str(error),
                    )
                self._trouble = error
            except Exception as error:  # noqa: BLE001 - whatever a tokenizer file does, the next look may be better
                self._log.exception("the served model could not be looked up")
                self._trouble = internal(error)
            # Files that cannot be read do not get better by being fetched four times a second.
            waiting = self._served is None and isinstance(self._trouble, Unavailable)
            pause = min(_IMPATIENT_POLL_S, self._poll_s) if waiting else self._poll_s
            try:
                await asyncio.wait_for(self._poke.wait(), pause)
            except TimeoutError:
                continue

    def _load(self, folder: Path) -> TextCodec:
        text = TextCodec.load(folder)
        self._prepare(text)
        return text

    async def _refresh(self) -> None:
        model = await self._client.get_model()
        served = self._served
        if served is not None and served.model == model:
            return
        if served is not None and served.model.tokenizer_sha256 == model.tokenizer_sha256:
            text = served.text
        else:
            # Everything is in memory once loaded: the folder lives for a moment.
            with tempfile.TemporaryDirectory(prefix="triptych-tokenizer-") as folder:
                await self._client.get_tokenizer(Path(folder))
                text = await asyncio.to_thread(self._load, Path(folder))
        self._served = Served(model, text)
        self._log.info(
            "serving",
            model=model.served_name,
            max_model_len=model.max_model_len,
            chat_template=text.chat_template is not None,
            tool_format=text.tool_format,
            thinks=text.thinks,
            tokenizer=model.tokenizer_sha256[:12],
        )
