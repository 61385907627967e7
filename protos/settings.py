"""Settings of the services.

A flag comes before a ``TRIPTYCH_*`` variable, and that before the variable of another stack.
"""

import os
import re
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from protos.errors import ConfigurationRefused


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
    ADDRESSES = "Addresses"
    LINKS = "Security between services"
    TIMEOUTS = "Timeouts and shutdown"
    LOGGING = "Logging and statistics"
    LAUNCHER = "Launcher"


class ServiceSettings(BaseSettings):
    """Base of each settings class: frozen, kebab-case flags, ``TRIPTYCH_`` variables.

    The class variables describe the fields of the class that declares them; a subclass inherits the rest.
    """

    reference_names: ClassVar[Mapping[str, str | tuple[str, ...]]] = {}
    """By field: the variable with the same meaning in vLLM, vLLM-RBLN or vLLM-Spyre, or its several names."""
    reference_opposites: ClassVar[Mapping[str, str]] = {}
    """By field: another stack's variable that turns the field off if it is true."""
    groups: ClassVar[Mapping[Group, tuple[str, ...]]] = {}
    """The fields under each heading of ``--help``; every field has one heading."""
    fixed: ClassVar[Mapping[str, str]] = {}
    """Inherited fields that the program sets itself, each with the reason. They have no flag and no
    variable. With an empty reason, a subclass lets the user set a field again."""

    model_config = SettingsConfigDict(
        env_prefix="TRIPTYCH_",
        env_ignore_empty=True,
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
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - we read no .env files
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - nor secret files
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Returns the sources in order of precedence."""
        return init_settings, _NotFixed(settings_cls, env_settings), _ReferenceNames(settings_cls)


def declared(cls: type[BaseSettings], variable: str) -> dict[Any, Any]:
    """Merges one of the class variables above over a settings class and its bases; the subclass wins."""
    merged: dict[Any, Any] = {}
    for base in reversed(cls.__mro__):
        merged |= vars(base).get(variable, {})
    return merged


def fixed_fields(cls: type[BaseSettings]) -> dict[str, str]:
    """Returns the fields without flag and variable, each with the reason."""
    return {name: reason for name, reason in declared(cls, "fixed").items() if reason}


def group_of(cls: type[BaseSettings], field: str) -> Group | None:
    """Returns the heading of a field in ``--help``; ``None`` if no class declares one."""
    for base in cls.__mro__:
        groups: Mapping[Group, tuple[str, ...]] = vars(base).get("groups", {})
        for group, fields in groups.items():
            if field in fields:
                return group
    return None


def reference_variables(cls: type[BaseSettings], field: str) -> tuple[str, ...]:
    """Returns the variables of other stacks that set a field."""
    names: str | tuple[str, ...] = declared(cls, "reference_names").get(field, ())
    return (names,) if isinstance(names, str) else names


class _NotFixed(PydanticBaseSettingsSource):
    """Another source without the fixed fields."""

    def __init__(self, settings_cls: type[BaseSettings], source: PydanticBaseSettingsSource) -> None:
        super().__init__(settings_cls)
        self._source = source

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self._source.get_field_value(field, field_name)

    def __call__(self) -> dict[str, Any]:
        fixed = fixed_fields(self.settings_cls)
        return {name: value for name, value in self._source().items() if name not in fixed}


class _ReferenceNames(PydanticBaseSettingsSource):
    """The variables that ``ServiceSettings.reference_names`` and ``reference_opposites`` list."""

    # `field` is part of the base class's signature.
    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002
        if self._is_turned_off(field_name):
            return False, field_name, False
        names = reference_variables(self.settings_cls, field_name)
        given = {name: text for name in names if (text := os.environ.get(name))}
        if len(set(given.values())) > 1:
            raise ConfigurationRefused(f"{' and '.join(given)} set one setting, and differ; unset one of them")
        return next(iter(given.values()), None), field_name, False

    def _is_turned_off(self, field_name: str) -> bool:
        variable = declared(self.settings_cls, "reference_opposites").get(field_name, "")
        text = os.environ.get(variable)
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


_BOOLEAN = TypeAdapter(bool)

# Descriptions say what an unset value means.
_NO_DEFAULT = re.compile(r"(^| )\(default(: null|: \(\)| factory: .*)\)$")

# Types of settings with several values, one behind another.
_SEVERAL = {"tuple[str,...]": "VALUE"}

_METAVARS = {"tuple[int,...]": "int,...", "dict[str,float]": "name=float,..."}


class _Parser(ArgumentParser):
    """Prints the flags of a settings class under their headings, and raises errors instead of exiting."""

    def __init__(self, cls: type[ServiceSettings]) -> None:
        prog = cls.model_config.get("cli_prog_name")
        super().__init__(
            prog=prog,
            usage="%(prog)s [FLAGS]",
            description=(cls.__doc__ or "").partition("\n\n")[0],
            epilog="Each flag is also a variable: --log-level is TRIPTYCH_LOG_LEVEL. The flag wins.",
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._settings = cls
        self._fixed = fixed_fields(cls)
        used = {group_of(cls, name) for name in cls.model_fields if name not in self._fixed}
        self._sections = {group: self.add_argument_group(group) for group in Group if group in used}

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
        if options.get("metavar") in _SEVERAL:
            options |= {"action": "extend", "nargs": "+", "metavar": _SEVERAL[options["metavar"]]}
        if field not in self._fixed:
            group = group_of(self._settings, field)
            container = self if group is None else self._sections[group]
            container.add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        """Refuses a flag.

        Raises:
            ConfigurationRefused: Always.
        """
        raise ConfigurationRefused(message)


S = TypeVar("S", bound=ServiceSettings)


def load(cls: type[S], argv: list[str] | None = None) -> S:
    """Reads the settings from flags (``sys.argv`` if ``None``) and the environment.

    Raises:
        ConfigurationRefused: A setting is bad or unknown. The message is one line that names it.
        SystemExit: With code 0, after ``--help``.
    """
    try:
        source: CliSettingsSource[Any] = CliSettingsSource(
            cls,
            root_parser=_Parser(cls),
            add_argument_method=_Parser.add_setting,
            # Nested models would get a heading of their own.
            add_argument_group_method=lambda parser, **_: parser,
            cli_parse_args=True if argv is None else argv,
        )
        return cls(_cli_settings_source=source)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        text = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if not first["loc"]:  # settings that contradict each other: the text names them
            raise ConfigurationRefused(text) from error
        name = str(first["loc"][0])
        names = [f"TRIPTYCH_{name.upper()}"]
        names += [other for other in reference_variables(cls, name) if os.environ.get(other) == first["input"]]
        flag = f"--{name.replace('_', '-')} ({', '.join(names)})"
        raise ConfigurationRefused(f"{flag} {text}, got {first['input']!r}") from error
    except SettingsError as error:
        raise ConfigurationRefused(" ".join(str(error).split())) from error
