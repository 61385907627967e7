"""The formats in which models mark their thinking, as data, and the parser that reads all of them.

Entries go by vLLM's names. The prompt decides first: a template that ends with ``<think>`` has opened the
thinking, a template that ends with ``</think>`` (Qwen 3 with ``enable_thinking: false``) has closed it. The
request's ``chat_template_kwargs`` decide where the prompt does not show it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, Final, Literal

from gateway.parsers.events import Event, Reasoning, Text
from gateway.parsers.parser_base import ParserBase, split_at

SWITCHES: Final = ("enable_thinking", "thinking")
"""Variables of chat templates that switch thinking, in the order of their frequency."""

# How many of a prompt's last tokens show the end of its generation prompt.
TAIL_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class ThinkingFormat:
    """How a family of models marks its thinking."""

    start: str = "<think>"
    end: str = "</think>"
    also_start: tuple[str, ...] = ()
    """Other texts in place of ``start``, for reading."""
    also_end: tuple[str, ...] = ()
    """Other texts in place of ``end``, for reading."""
    answer: tuple[tuple[str, str], ...] = ()
    """Pairs of texts around the answer; may be missing."""
    turn_end: str = ""
    """After the answer and all calls; may be missing."""
    unmarked: Literal["never", "on request", "by default"] = "never"
    """Whether the thinking begins although neither the prompt nor the model writes ``start``: not at all, if
    switched on, or unless switched off."""
    switches: tuple[str, ...] = SWITCHES
    """Variables of the chat template that switch the thinking."""

    @property
    def starts(self) -> tuple[str, ...]:
        """All texts before the thinking, without white space around them."""
        return tuple(text.strip() for text in (self.start, *self.also_start))

    @property
    def ends(self) -> tuple[str, ...]:
        """All texts after the thinking, without white space around them."""
        return tuple(text.strip() for text in (self.end, *self.also_end))

    def texts(self) -> tuple[str, ...]:
        """Returns all texts that may contain special tokens of the tokenizer."""
        around = (text for pair in self.answer for text in pair)
        return tuple(filter(None, (*self.starts, *self.ends, *around, self.turn_end)))

    def wanted(self, variables: Mapping[str, Any]) -> bool | None:
        """Returns whether ``variables`` switch the thinking on or off; ``None`` if they do not say."""
        if not self.switches:
            return None
        if variables.get("reasoning_effort") == "none":
            return False
        given = [variables[name] for name in self.switches if variables.get(name) is not None]
        return any(map(_is_on, given)) if given else None


_OFF: Final = frozenset({"disabled", "false", "no", "none", "off"})


def _is_on(value: Any) -> bool:
    """Whether a variable switches thinking on. Some clients write it as in other APIs."""
    if isinstance(value, Mapping):
        value = value.get("type")
    return value.casefold() not in _OFF if isinstance(value, str) else bool(value)


THINK: Final = ThinkingFormat()
"""Qwen's markers, which most models use."""

THINKING_FORMATS: Final[Mapping[str, ThinkingFormat]] = MappingProxyType(
    {
        "qwen3": THINK,
        "deepseek_r1": ThinkingFormat(unmarked="by default", switches=()),
        "deepseek_v3": ThinkingFormat(unmarked="on request"),
        "deepseek_v4": ThinkingFormat(unmarked="by default"),
        "granite": ThinkingFormat(
            start="Here is my thought process:",
            end="Here is my response:",
            also_start=("Here's my thought process:", "<think>"),
            also_end=("Here's my response:", "</think>"),
            answer=(("<response>", "</response>"),),
        ),
        "gemma4": ThinkingFormat(start="<|channel>thought\n", end="<channel|>"),
        "minimax_m3": ThinkingFormat(start="<mm:think>", end="</mm:think>"),
        "seed_oss": ThinkingFormat(start="<seed:think>", end="</seed:think>"),
        "mistral": ThinkingFormat(
            start="[THINK]", end="[/THINK]", also_start=("<think>",), also_end=("</think>",)
        ),
        "ernie45": ThinkingFormat(answer=(("<response>\n", "\n</response>"),), unmarked="by default"),
        "hunyuan_a13b": ThinkingFormat(answer=(("<answer>\n", "\n</answer>"),)),
        "cohere": ThinkingFormat(
            start="<|START_THINKING|>",
            end="<|END_THINKING|>",
            answer=(
                ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
                ("<|START_TEXT|>", "<|END_TEXT|>"),
            ),
        ),
        "kimi_k3": ThinkingFormat(
            start="<|open|>think<|sep|>",
            end="<|close|>think<|sep|>",
            answer=(("<|open|>response<|sep|>", "<|close|>response<|sep|>"),),
            turn_end="<|close|>message<|sep|>",
        ),
    }
)
"""By vLLM's names."""

THINKING_ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "glm45": "qwen3",
        "glm47": "qwen3",
        "granite_thinking_parser": "qwen3",
        "ling3": "qwen3",
        "mimo": "qwen3",
        "nemotron_v3": "qwen3",
        "olmo3": "qwen3",
        "step3p5": "qwen3",
        "minimax_m2": "deepseek_r1",
        "step3": "deepseek_r1",
        "deepseek_v31": "deepseek_v3",
        "deepseek_v32": "deepseek_v3",
        "poolside_v1": "deepseek_v3",
        "deepseek_v41": "deepseek_v4",
        "holo2": "deepseek_v4",
        "kimi_k2": "deepseek_v4",
        "cohere_command3": "cohere",
        "cohere_command4": "cohere",
    }
)
"""Other names of the same formats."""


class Thinking(Enum):
    """Where an answer begins, relative to the thinking."""

    OPEN = auto()
    """Inside the thinking."""
    POSSIBLE = auto()
    """Before it, if the model thinks at all."""
    OVER = auto()
    """After it."""
    ANSWER = auto()
    """After it, and after a text that begins the answer."""


def thinking_at(
    form: ThinkingFormat, prompt_tail: str, *, variables: Mapping[str, Any], continued: str = ""
) -> Thinking:
    """Returns the beginning of the answer to a prompt.

    Args:
        form: how the model marks its thinking.
        prompt_tail: text of the prompt's last tokens, special ones included.
        variables: the values of the chat template's variables.
        continued: the content of a last turn that the answer continues.
    """
    if continued.strip():
        return Thinking.OPEN if _last(continued, form.starts) > _last(continued, form.ends) else Thinking.OVER
    tail = prompt_tail.rstrip()
    for at, texts in (
        (Thinking.OVER, form.ends),
        (Thinking.OPEN, form.starts),
        (Thinking.ANSWER, tuple(begin.strip() for begin, _ in form.answer)),
    ):
        if tail.endswith(texts):
            return at
    wanted = form.wanted(variables)
    unmarked = (
        wanted is not False if form.unmarked == "by default" else form.unmarked == "on request" and wanted
    )
    return Thinking.OPEN if unmarked else Thinking.POSSIBLE


def _last(text: str, markers: Collection[str]) -> int:
    return max(text.rfind(marker) for marker in markers)


class ThinkParser(ParserBase):
    """Yields thinking as :class:`Reasoning` and the rest as :class:`Text`, without the texts around them.

    Implements :class:`gateway.parsers.events.ToolParser`. If the text ends inside the thinking, all of it is
    thinking. Only the first end marker counts. A text that may begin a call interrupts the thinking: all that
    follows is :class:`Text`, and :attr:`interrupted` reads the parts of it outside calls.
    """

    interrupted: "ThinkParser | None"
    """Reads the text around calls once one of ``triggers`` has interrupted the thinking."""

    def __init__(self, at: Thinking, form: ThinkingFormat = THINK, triggers: Sequence[str] = ()) -> None:
        """Expects a text that begins at ``at``; ``triggers`` are the texts that begin calls."""
        self.interrupted = None
        self._at = at
        self._form = form
        self._triggers = tuple(triggers)
        # Read for every token.
        self._interruptions = (*form.ends, *triggers)
        self._openers = {begin.strip(): (begin, end) for begin, end in form.answer}
        self._closers: tuple[str, ...] = (form.turn_end,) if form.turn_end else ()
        if at is Thinking.ANSWER:
            self._expect(end for _, end in form.answer)
        states = {Thinking.OVER: self._before_answer, Thinking.ANSWER: self._answer}
        super().__init__(states.get(at, self._begin))

    def call(self) -> list[Event]:
        """Notes that a call has followed the text so far, and returns the events held back.

        It ends the thinking: further text is content, except for an end marker.
        """
        out = self.finish()
        if self._state in (self._begin, self._thinking):
            self._state = self._ended
        return out

    def _begin(self, out: list[Event]) -> bool:
        starts, ends = self._form.starts, self._form.ends
        if not self._skip() or (marker := self._leading((*starts, *ends, *self._openers))) is None:
            return False
        if marker in starts or marker in ends:
            self._passed()
            self._rest = self._rest[len(marker) :]
            self._state = self._thinking if marker in starts else self._before_answer
            out.append(Reasoning(""))
        else:
            self._back()
            inside = self._at is Thinking.OPEN and not marker
            self._state = self._thinking if inside else self._before_answer
        return True

    def _leading(self, markers: Collection[str]) -> str | None:
        """Returns the marker at the front of the rest, or nothing; ``None`` if further text decides."""
        if any(marker.startswith(self._rest) and marker != self._rest for marker in markers):
            return None
        return next((marker for marker in markers if self._rest.startswith(marker)), "")

    def _thinking(self, out: list[Event]) -> bool:
        thought, marker, self._rest = split_at(self._rest, self._interruptions)
        out.append(Reasoning(thought))
        if marker in self._triggers:
            self._rest, self._state = marker + self._rest, self._as_text
            self.interrupted = ThinkParser(Thinking.OPEN, self._form)
        elif marker:
            self._state = self._before_answer
        return bool(marker)

    def _ended(self, out: list[Event]) -> bool:
        """Drops the end marker of thinking that a call has ended."""
        text, marker, self._rest = split_at(self._rest, self._form.ends)
        out.append(Text(text))
        if marker:
            self._state = self._before_answer
        return bool(marker)

    def _as_text(self, out: list[Event]) -> bool:
        out.append(Text(self._rest))
        self._rest = ""
        return False

    def _before_answer(self, out: list[Event]) -> bool:  # noqa: ARG002 - as all states
        if not self._openers:
            self._state = self._answer
            return True
        if not self._skip() or (marker := self._leading(self._openers)) is None:
            return False
        if marker:
            begin, end = self._openers[marker]
            self._passed()
            self._rest = self._rest[len(marker) :]
            self._expect((end,))
            self._state = self._line_break if begin.endswith("\n") else self._answer
        else:
            self._back()
            self._state = self._answer
        return True

    def _line_break(self, out: list[Event]) -> bool:  # noqa: ARG002 - as all states
        self._rest = self._rest.removeprefix("\n")
        self._state = self._answer
        return True

    def _expect(self, ends: Iterable[str]) -> None:
        """Lets one of ``ends`` end the answer, with or without the white space around it."""
        self._closers += tuple(text for end in ends for text in (end, end.strip()))

    def _answer(self, out: list[Event]) -> bool:
        if not self._closers:
            return self._as_text(out)
        text, marker, self._rest = split_at(self._rest, self._closers)
        out.append(Text(text))
        if marker:
            self._closers = (self._form.turn_end,) if self._form.turn_end else ()
            self._state = self._answered
        return bool(marker)

    def _answered(self, out: list[Event]) -> bool:  # noqa: ARG002 - as all states
        """Keeps white space after the answer if more text follows."""
        if not self._skip():
            return False
        self._back()
        self._state = self._answer
        return True

    def _end(self, out: list[Event]) -> None:
        if self._state == self._answered:
            self._passed()
        open_ = self._state == self._thinking or (self._state == self._begin and self._at is Thinking.OPEN)
        self._back()
        if self._rest:
            out.append(Reasoning(self._rest) if open_ else Text(self._rest))
