"""The file of keys: YAML, or JSON, which is YAML too. docs/security.md describes it."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from gateway.auth.identity import ANY_PRIORITY, Caller
from gateway.auth.rate_limits import Limits
from protos.command_line.yaml_text import parse_yaml
from protos.errors import ConfigurationRefused
from protos.limits import MAX_NAME_BYTES

_MOST_BYTES: Final = 4 * 1024 * 1024

_Count = Annotated[int, Field(ge=1)]
_Priority = Annotated[int, Field(ge=ANY_PRIORITY[0], le=ANY_PRIORITY[1])]


def _is_tenant(value: str) -> str:
    if not value.isprintable() or len(value.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"should be printable, and at most {MAX_NAME_BYTES} bytes")
    return value


class _Strict(BaseModel):
    # An error must not repeat its input, which may be a key.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class KeyEntry(_Strict):
    """One key of the file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    """Shown in logs and metrics."""
    key: Annotated[SecretStr, Field(min_length=1)] | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """The key's SHA-256, hexadecimal, instead of the key."""
    tenant: Annotated[str, AfterValidator(_is_tenant)] | None = None
    """If unset, the key's name is the tenant."""
    may_name_tenant: bool = False
    min_priority: _Priority = 0
    max_priority: _Priority = 0
    max_concurrent_requests: _Count | None = None
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    admin: bool = False

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("needs either 'key' or 'sha256'")
        if self.min_priority > self.max_priority:
            raise ValueError("has min_priority above max_priority")
        return self

    @property
    def digest(self) -> bytes:
        """The key's SHA-256."""
        return bytes.fromhex(self.sha256) if self.key is None else digest_of(self.key.get_secret_value())  # type: ignore[arg-type] # one of them is set

    @property
    def caller(self) -> Caller:
        """The key's rights."""
        return Caller(
            name=self.name,
            tenant=self.name if self.tenant is None else self.tenant,
            may_name_tenant=self.may_name_tenant,
            priorities=(self.min_priority, self.max_priority),
            is_admin=self.admin,
            is_isolated=True,
        )

    @property
    def limits(self) -> Limits:
        """The key's limits."""
        return Limits(self.max_concurrent_requests, self.requests_per_minute, self.tokens_per_minute)


class _KeyFile(_Strict):
    keys: Annotated[list[KeyEntry], Field(min_length=1)]

    @model_validator(mode="after")
    def _are_distinct(self) -> Self:
        names: set[str] = set()
        owners: dict[bytes, str] = {}
        for entry in self.keys:
            if entry.name in names:
                raise ValueError(f"names '{entry.name}' twice")
            names.add(entry.name)
            if (owner := owners.setdefault(entry.digest, entry.name)) != entry.name:
                raise ValueError(f"gives '{owner}' and '{entry.name}' the same key")
        return self


def digest_of(key: str) -> bytes:
    """Returns the SHA-256 of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_key_file(path: Path) -> Sequence[KeyEntry]:
    """Returns the keys of a file.

    Raises:
        ConfigurationRefused: if the file cannot be read or is wrong; the message repeats none of its values.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigurationRefused(f"cannot read the key file {path}: {error.strerror}") from None
    if len(content) > _MOST_BYTES:
        raise ConfigurationRefused(f"the key file {path} is larger than {_MOST_BYTES} bytes")
    try:
        return _KeyFile.model_validate(_parsed(path, content)).keys
    except ValidationError as error:
        raise ConfigurationRefused(f"the key file {path} is wrong: {_reason(error)}") from None


def _parsed(path: Path, content: bytes) -> Any:
    try:
        return parse_yaml(content)
    except ValueError as error:
        raise ConfigurationRefused(f"the key file {path} is neither YAML nor JSON{error}") from None


def _reason(error: ValidationError) -> str:
    """Returns the first thing that is wrong, with its place: ``keys[2].sha256 should match …``."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    text = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if first["type"] == "model_type":
        text = "should have fields, such as `name`" if place else "should have a list `keys`"
    return f"{place.removeprefix('.')} {text[0].lower()}{text[1:]}".strip()
