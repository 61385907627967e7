"""How every service reads its settings: flags, then ``TRIPTYCH_*`` variables, then the names of the stacks that users come from."""

import os
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from protos.errors import ConfigurationRefused


class ReferenceNames(PydanticBaseSettingsSource):
    """Variables of other stacks, with exactly their meaning: what ``ServiceSettings.reference_names`` maps."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002 - the base's signature
        """The variable's text for a field, if it has one and it is set."""
        names: dict[str, str] = getattr(self.settings_cls, "reference_names", {})
        return os.environ.get(names.get(field_name, "")) or None, field_name, False

    def __call__(self) -> dict[str, Any]:
        """All fields that are set this way."""
        values = {
            name: self.get_field_value(field, name)[0]
            for name, field in self.settings_cls.model_fields.items()
        }
        return {name: value for name, value in values.items() if value is not None}


class ServiceSettings(BaseSettings):
    """Base of each service's settings class: frozen, kebab-case flags, ``TRIPTYCH_`` variables.

    Attributes:
        reference_names: field name to the variable that sets it in a vLLM-RBLN or vLLM-Spyre deployment.
    """

    reference_names: ClassVar[dict[str, str]] = {}

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
        """Order of precedence."""
        return init_settings, env_settings, ReferenceNames(settings_cls)


S = TypeVar("S", bound=ServiceSettings)


def load(cls: type[S], argv: list[str] | None = None) -> S:
    """Reads flags (``sys.argv`` if ``None``) and environment.

    Raises:
        ConfigurationRefused: on a bad or unknown setting; one line that names it.
        SystemExit: with code 0 after ``--help``.
    """
    try:
        source: CliSettingsSource[S] = CliSettingsSource(
            cls, cli_parse_args=True if argv is None else argv, cli_exit_on_error=False
        )
        return cls(_cli_settings_source=source)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        text = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if not first["loc"]:  # settings that do not go together: the text names them
            raise ConfigurationRefused(text) from error
        name = str(first["loc"][0])
        flag = f"--{name.replace('_', '-')} (TRIPTYCH_{name.upper()})"
        raise ConfigurationRefused(f"{flag} {text}, got {first['input']!r}") from error
    except SettingsError as error:
        raise ConfigurationRefused(" ".join(str(error).split())) from error
