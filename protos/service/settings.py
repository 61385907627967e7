"""Settings of the services.

The order is flag, ``TRIPTYCH_*`` variable, variable of another stack, file of ``--config``.
"""

import json
import os
import re
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, NoReturn, Protocol, TypeAlias, TypeVar

from pydantic import TypeAdapter, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from protos.errors import ConfigurationRefused
from protos.service.config_file import ConfigFile
from protos.service.help import SearchableHelp, unknown_arguments
from protos.service.redaction import without_users, words_shown

CONFIG_VARIABLE: Final = "TRIPTYCH_CONFIG"
"""The variable of ``--config``."""

_EMPTY: Final = "may be empty"
MayBeEmpty: TypeAlias = Annotated[str, _EMPTY]
"""A text whose empty value is valid; its description says why."""


class Group(StrEnum):
    """The headings of ``--help``, in their order."""

    MODEL = "Model"
    DEVICE = "Device"
    RANKS = "Ranks of a replica"
    LORA = "LoRA adapters"
    BATCHING = "Batching"
    KV_MEMORY = "KV memory"
    COMPILATION = "Compilation"
    POOLING = "Pooling models"
    STRUCTURED_OUTPUT = "Structured output"
    QUEUE = "Waiting requests"
    HTTP_API = "HTTP API"
    SECURITY = "Keys, TLS and browsers"
    ADDRESSES = "Addresses"
    LINKS = "Security between services"
    TIMEOUTS = "Timeouts and shutdown"
    LOGGING = "Logging and statistics"
    LAUNCHER = "Launcher"


class ForeignFlags(Protocol):
    """The flags of another program."""

    @property
    def flags(self) -> Mapping[str, str]:
        """Its flags with their dashes, and the meaning of each as the rest of a sentence."""

    def translate(self, argv: Sequence[str]) -> list[str]:
        """Returns our flags for a command line; arguments that the other program does not know stay.

        Raises:
            ConfigurationRefused: A flag cannot be served.
        """

    def written(self, flag: str, value: Any) -> list[str]:
        """Returns the arguments that give a flag a value of a configuration file."""


class ServiceSettings(BaseSettings):
    """Base of each settings class: frozen, kebab-case flags, ``TRIPTYCH_`` variables.

    The class variables describe the fields of the class that declares them; a subclass inherits the rest.
    """

    reference_names: ClassVar[Mapping[str, str | tuple[str, ...]]] = {}
    """By field: the variable with the same meaning in vLLM, vLLM-RBLN or vLLM-Spyre, or its several names."""
    reference_opposites: ClassVar[Mapping[str, str]] = {}
    """By field: another stack's variable; true turns the field off."""
    also_set_by: ClassVar[Mapping[str, str]] = {}
    """By field: another field whose flag, variable or file entry may set it."""
    groups: ClassVar[Mapping[Group, tuple[str, ...]]] = {}
    """The fields under each heading of ``--help``; every field belongs to a heading."""
    fixed: ClassVar[Mapping[str, str]] = {}
    """Inherited fields set by the program, each with the reason; without flag and variable. With an empty
    reason, a subclass lets the user set a field again."""

    section: ClassVar[str] = ""
    """The section of a configuration file with the fields of the class that declares it."""
    file_names: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """By section: names in a configuration file for another field; an empty field stands for none."""
    common: ClassVar[tuple[str, ...]] = ()
    """The fields in ``--help``; empty for every field, as always in ``--help-all``."""
    positional: ClassVar[str] = ""
    """A field whose value may also be given without a flag."""

    model_config = SettingsConfigDict(
        env_prefix="TRIPTYCH_",
        frozen=True,
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_implicit_flags=True,
        extra="ignore",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - ours leave some out
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - we read no .env files
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - nor secret files
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Returns the sources in order of precedence."""
        return (
            init_settings,
            _OwnVariables(settings_cls),
            _ReferenceNames(settings_cls),
            InitSettingsSource(settings_cls, _file_values.get()),
        )

    @field_validator("*", mode="before")
    @classmethod
    def _is_not_empty(cls, value: object, info: ValidationInfo) -> object:
        """Refuses an empty flag or entry of a file: an unset shell variable must not turn protection off."""
        if value == "" and not may_be_empty(cls, str(info.field_name)):
            raise ValueError("is empty; give it a value, or omit it")
        return value


def declared(cls: type[BaseSettings], variable: str) -> dict[Any, Any]:
    """Merges a class variable above over a settings class and its bases; the subclass wins."""
    merged: dict[Any, Any] = {}
    for base in reversed(cls.__mro__):
        merged |= vars(base).get(variable, {})
    return merged


def fixed_fields(cls: type[BaseSettings]) -> dict[str, str]:
    """Returns the fields without flag and variable, each with the reason."""
    return {name: reason for name, reason in declared(cls, "fixed").items() if reason}


def group_of(cls: type[BaseSettings], field: str) -> Group | None:
    """Returns the heading of a field in ``--help``; ``None`` if no class declares it."""
    for base in cls.__mro__:
        groups: Mapping[Group, tuple[str, ...]] = vars(base).get("groups", {})
        for group, fields in groups.items():
            if field in fields:
                return group
    return None


def reference_variables(cls: type[BaseSettings], field: str) -> tuple[str, ...]:
    """Returns the variables of other stacks for a field."""
    names: str | tuple[str, ...] = declared(cls, "reference_names").get(field, ())
    return (names,) if isinstance(names, str) else names


def may_be_empty(cls: type[BaseSettings], field: str) -> bool:
    """Returns whether an empty text is a value of the field."""
    return _EMPTY in cls.model_fields[field].metadata


def is_secret(cls: type[BaseSettings], field: str) -> bool:
    """Returns whether the field's values must not be shown: neither in errors nor in flags of a service."""
    return "SecretStr" in repr(cls.model_fields[field].annotation) if field in cls.model_fields else False


# Kubernetes sets TRIPTYCH_PORT=tcp://10.0.0.1:8000 in the pods beside a service that is called triptych.
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")


class _OwnVariables(EnvSettingsSource):
    """Our variables, except for fixed fields and for addresses set by Kubernetes as ports.

    Compose files pass an unset variable as empty: an empty value counts only where it is valid.
    """

    def __call__(self) -> dict[str, Any]:
        fixed = fixed_fields(self.settings_cls)
        return {
            name: value
            for name, value in super().__call__().items()
            if name not in fixed
            and (value != "" or may_be_empty(self.settings_cls, name))
            and not (name.endswith("port") and _SERVICE_LINK.match(str(value)))
        }


class _ReferenceNames(PydanticBaseSettingsSource):
    """The variables in ``ServiceSettings.reference_names`` and ``reference_opposites``."""

    # `field` is part of the base class's signature.
    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002
        if self._is_turned_off(field_name):
            return False, field_name, False
        names = reference_variables(self.settings_cls, field_name)
        given = {name: text for name in names if (text := os.environ.get(name, "").strip())}
        if len({_BOOLEANS.get(text.lower(), text) for text in given.values()}) > 1:
            raise ConfigurationRefused(
                f"{' and '.join(given)} set one setting, and differ; unset one of them"
            )
        return next(iter(given.values()), None), field_name, False

    def _is_turned_off(self, field_name: str) -> bool:
        variable = declared(self.settings_cls, "reference_opposites").get(field_name, "")
        text = os.environ.get(variable, "").strip()
        try:
            return bool(text) and _BOOLEAN.validate_python(text)
        except ValidationError as error:
            raise ConfigurationRefused(f"{variable} should be 0 or 1, got {text!r}") from error

    def __call__(self) -> dict[str, Any]:
        fixed = fixed_fields(self.settings_cls)
        values = {
            name: self.get_field_value(field, name)[0]
            for name, field in self.settings_cls.model_fields.items()
            if name not in fixed
        }
        return {name: value for name, value in values.items() if value is not None}


# The values of the configuration file for the loading class.
_file_values: ContextVar[dict[str, Any]] = ContextVar("file_values", default={})  # noqa: B039 - never changed

_BOOLEAN = TypeAdapter(bool)
# Two variables with one of these words each agree.
_BOOLEANS = {"true": "1", "yes": "1", "on": "1", "false": "0", "no": "0", "off": "0"}

# Descriptions say what an unset value means.
_NO_DEFAULT = re.compile(r"(^| )\(default(: null|: \(\)|: \{\}|: None| factory: .*)\)$")

# Types of settings with several values in a row.
_SEVERAL = {"tuple[str,...]": "VALUE", "tuple[SecretStr,...]": "KEY"}

_METAVARS = {"tuple[int,...]": "int,...", "dict[str,float]": "name=float,...", "dict[str,Any]": "JSON"}


class _Parser(SearchableHelp):
    """Prints the flags of a settings class under their headings, and raises errors instead of exiting."""

    config: str | None = None
    """The configuration file of the command line."""

    def __init__(self, cls: type[ServiceSettings], known: Mapping[str, str]) -> None:
        prog = cls.model_config.get("cli_prog_name")
        super().__init__(
            prog=prog,
            usage=f"%(prog)s {f'[{cls.positional.upper()}] ' if cls.positional else ''}[FLAGS]",
            description=(cls.__doc__ or "").partition("\n\n")[0],
            epilog="Each flag is also a variable: --log-level is TRIPTYCH_LOG_LEVEL. A flag comes before a"
            " variable, and a variable before the file of --config. --help-all shows all flags, --help=WORD the"
            " heading or the flags that it names; --help=listgroup lists the headings.",
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._settings = cls
        self._fixed = fixed_fields(cls)
        used = {group_of(cls, name) for name in cls.model_fields if name not in self._fixed}
        self._sections = {group: self.add_argument_group(group) for group in Group if group in used}
        self._known = known
        text = "YAML file with settings, in sections by service or without (TRIPTYCH_CONFIG)."
        self.add_argument("--config", metavar="FILE", help=text)

    # The signature is that of the base class.
    def parse_args(self, args: Sequence[str], namespace: Namespace | None = None) -> Namespace:  # type: ignore[override]
        """Reads a command line, and takes the configuration file out of the result."""
        for argument in args:
            if argument.startswith(("--help=", "--help-all")):
                sys.stdout.write(self.found(argument.partition("=")[2] or "all", self._known))
                self.exit()
        parsed: Namespace
        parsed, rest = self.parse_known_args(args, namespace)
        if rest[:1] == ["--"]:
            rest = rest[1:]
        field = self._settings.positional
        if field and len(rest) == 1 and not rest[0].startswith("-"):
            given = getattr(parsed, field, rest[0])
            if given not in {rest[0], PydanticUndefined}:
                word = words_shown(rest, args)
                self.error(f"the {field} is given twice: {word} and --{field} {given}; omit one")
            setattr(parsed, field, rest.pop())
        if field and len(rest) > 1 and not any(word.startswith("-") for word in rest):
            first = words_shown(rest[:1], args)
            text = unknown_arguments(rest[1:], (), args)
            self.error(f"{text}; {first} is the {field}, and a switch takes no value")
        for flag in (argument.partition("=")[0] for argument in rest):
            name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
            if flag.startswith("--") and name in self._fixed:
                self.error(f"{flag} cannot be set here: {self._fixed[name]}")
        if rest:
            self.error(unknown_arguments(rest, {*self._option_string_actions, *self._known}, args))
        self.config = parsed.config
        del parsed.config
        return parsed

    def add_setting(self, *names: str, **options: Any) -> None:
        """Adds a flag under its field's heading, unless the field is fixed."""
        # A field of a nested model is called `compilation_config.level`.
        field = options["dest"].partition(".")[0]
        text = options["help"]
        if options.get("metavar") == "JSON":  # pydantic drops the description of a nested model
            text = self._settings.model_fields[field].description or ""
        options["help"] = _NO_DEFAULT.sub("", text)
        if (metavar := options.get("metavar")) in _METAVARS:
            options["metavar"] = _METAVARS[metavar]
        if options.get("metavar") == "tuple[SecretStr,...]":
            options["type"] = json.dumps  # pydantic splits a value without quotes at its commas
        if options.get("metavar") in _SEVERAL:
            options |= {"action": "extend", "nargs": "+", "metavar": _SEVERAL[options["metavar"]]}
        if field not in self._fixed:
            group = group_of(self._settings, field)
            container = self if group is None else self._sections[group]
            container.add_argument(*names, **options)

    def format_help(self) -> str:
        """Returns the help of the common settings, or of all if the class names none."""
        common = self._settings.common
        return self.short_help(("help", "config", *common)) if common else self.full_help()

    def error(self, message: str) -> NoReturn:
        """Refuses a flag."""
        raise ConfigurationRefused(message)


S = TypeVar("S", bound=ServiceSettings)


def load(cls: type[S], argv: Sequence[str] | None = None, foreign: ForeignFlags | None = None) -> S:
    """Reads the settings from flags (``sys.argv`` if ``None``), the environment and a configuration file.

    Args:
        cls: the settings class.
        argv: the command line without the program's name.
        foreign: accepted flags of another program, also allowed in a file.

    Raises:
        ConfigurationRefused: A setting is bad or unknown. The message names it in a line.
        SystemExit: With code 0, after ``--help``.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    file: ConfigFile | None = None
    try:
        parser, source = _flags(cls, foreign.translate(given) if foreign else given, foreign)
        path = parser.config if parser.config is not None else os.environ.get(CONFIG_VARIABLE) or None
        if path is not None:
            file = ConfigFile.read(Path(path))
        token = _file_values.set(_values_of(file, cls, foreign) if file else {})
        try:
            return cls(_cli_settings_source=source)
        except ValidationError as error:
            raise _refusal(cls, error, file, set(source())) from (None if _hides(cls, error) else error)
        finally:
            _file_values.reset(token)
    except SettingsError as error:
        raise ConfigurationRefused(" ".join(str(error).split())) from error


def _flags(
    cls: type[S], argv: Sequence[str], foreign: ForeignFlags | None
) -> tuple[_Parser, CliSettingsSource[Any]]:
    parser = _Parser(cls, foreign.flags if foreign else {})
    source: CliSettingsSource[Any] = CliSettingsSource(
        cls,
        root_parser=parser,
        parse_args_method=_Parser.parse_args,
        add_argument_method=_Parser.add_setting,
        # Nested models would get a heading of their own.
        add_argument_group_method=lambda parser, **_: parser,
        cli_parse_args=list(argv),
    )
    return parser, source


def given_flags(
    cls: type[ServiceSettings], argv: Sequence[str], foreign: ForeignFlags | None = None
) -> set[str]:
    """Returns the fields set by a command line; arguments as for `load`."""
    return set(_flags(cls, foreign.translate(argv) if foreign else argv, foreign)[1]())


def sections_of(cls: type[ServiceSettings]) -> dict[str, dict[str, str]]:
    """Returns the sections of a configuration file for a class: by section, the field of each name."""
    fixed = fixed_fields(cls)
    owners: dict[str, type[ServiceSettings]] = {
        vars(base)["section"]: base
        for base in reversed(cls.__mro__)
        if issubclass(base, ServiceSettings) and vars(base).get("section")
    }
    sections: dict[str, dict[str, str]] = {}
    for section, owner in owners.items():
        inherited = {
            name
            for other in owners.values()
            if other is not owner and issubclass(owner, other)
            for name in other.model_fields
        }
        fields = {name: name for name in owner.model_fields if name not in fixed | dict.fromkeys(inherited)}
        fields |= cls.file_names.get(section, {})
        sections[section] = {name: field for name, field in fields.items() if field}
    return sections


def _values_of(file: ConfigFile, cls: type[ServiceSettings], foreign: ForeignFlags | None) -> dict[str, Any]:
    fixed = fixed_fields(cls)
    theirs = {flag[2:].replace("-", "_"): flag for flag in foreign.flags} if foreign else {}
    own = {name for name in cls.model_fields if name not in fixed} | theirs.keys()
    values = file.values(sections_of(cls), own, fixed)
    if foreign is None:
        return values
    given = [name for name in values if name in theirs and {name, f"no_{name}"} & file.shared.keys()]
    argv = [argument for name in given for argument in foreign.written(theirs[name], values.pop(name))]
    return values | _flags(cls, foreign.translate(argv), foreign)[1]()


def _hides(cls: type[ServiceSettings], error: ValidationError) -> bool:
    return any(is_secret(cls, str(first)) for each in error.errors() for first in each["loc"][:1])


def _refusal(
    cls: type[ServiceSettings], error: ValidationError, file: ConfigFile | None, flags: Collection[str]
) -> ConfigurationRefused:
    """Returns the line about the source of the first bad value."""
    first = error.errors(include_url=False)[0]
    text = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if not first["loc"]:  # settings that contradict each other: the text names them
        return ConfigurationRefused(text)
    name = str(first["loc"][0])
    names = [f"TRIPTYCH_{name.upper()}"]
    given = str(first["input"]).lower()  # levels of logs are lower case by now
    names += [other for other in reference_variables(cls, name) if os.environ.get(other, "").lower() == given]
    if file and name not in flags and not any(os.environ.get(variable) for variable in names):
        flag = f"{file.path}: {name}"
    else:
        key = "".join(f".{part}" for part in first["loc"][1:] if isinstance(part, str))
        flag = f"--{name.replace('_', '-')}{key} ({', '.join(names)})"
    return ConfigurationRefused(
        f"{flag} {text}"
        if is_secret(cls, name) or first["input"] == ""
        else without_users(f"{flag} {text}, got {first['input']!r}")
    )
