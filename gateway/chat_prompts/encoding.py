"""Token ids of conversations."""

from dataclasses import replace
from functools import partial

from gateway.chat_prompts.chat_input import ChatInput, ChatPrompt
from gateway.chat_prompts.sandbox import TemplateSandbox, job_of
from gateway.quoting import clip
from gateway.scheduler_link.served_model import ServedModel
from gateway.schemas.chat import TemplateInput
from gateway.settings import Settings
from gateway.text.tokenization import TextWorker
from protos.errors import InvalidArgument, Unsupported
from protos.logs import get_logger


class ChatEncoder:
    """Turns conversations into token ids."""

    def __init__(self, settings: Settings, worker: TextWorker) -> None:
        """Starts no process yet: the first template of a client does.

        Args:
            settings: say what clients may send.
            worker: runs long work.
        """
        self._trusts_templates = settings.trust_request_chat_template
        self._variables = settings.default_chat_template_kwargs
        self._worker = worker
        self._sandbox = TemplateSandbox()

    async def close(self) -> None:
        """Ends the processes that render clients' templates."""
        await self._sandbox.close()

    async def encode(
        self, served: ServedModel, chat: ChatInput, body: TemplateInput, *, special: bool, size: int
    ) -> list[int]:
        """Returns the token ids of a conversation.

        Args:
            served: the model.
            chat: the conversation.
            body: the request.
            special: whether to add BOS and its like; usually not, because chat templates bring their own.
            size: bytes of the request's body, which bound the effort: a template visits every message,
                however short.

        Raises:
            InvalidArgument: if there is no chat template, or it refuses the messages.
            Unsupported: if the client's own template is not allowed.
        """
        if self._variables:
            chat = replace(chat, defaults=self._variables)
        if body.chat_template is None:
            prompt = await self._worker.run(size, partial(self._write, served, chat))
        else:
            if not self._trusts_templates:
                raise Unsupported(
                    "chat_template is not supported: this deployment uses the model's own; omit it, or start the"
                    " gateway with --trust-request-chat-template",
                    param="chat_template",
                )
            make = partial(job_of, body.chat_template, served.text.special_tokens, chat)
            prompt = await self._sandbox.write(await self._worker.run(size, make))
        self._check(prompt)
        encode = partial(served.text.encode, prompt.text, add_special_tokens=special)
        return await self._worker.run(len(prompt.text), encode)

    def _write(self, served: ServedModel, chat: ChatInput) -> ChatPrompt:
        template = served.text.tool_template if chat.tools else served.text.chat_template
        if template is None:
            raise InvalidArgument(
                f"the model '{served.model.served_name}' has no chat template; use /v1/completions",
                param="messages",
            )
        return chat.write(template)

    def _check(self, prompt: ChatPrompt) -> None:
        """Refuses or logs parameters that the template does not read."""
        if not prompt.ignored:
            return
        names = [clip(name) for name in prompt.ignored[:32]]
        get_logger().debug("the chat template does not read some parameters", fields=names)
