"""All keys of a gateway, from its settings and its file, and the rights of their callers."""

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator
from starlette.datastructures import Headers
from starlette.requests import Request

from gateway.auth.rate_limits import KeyLimiter, Limits, Page, SharedLedger
from gateway.settings import SecuritySettings
from protos.errors import ConfigurationRefused, InvalidArgument
from protos.limits import MAX_NAME_BYTES
from protos.service.config_file import parse_yaml
from protos.service.logs import get_logger
from protos.service.private_files import read_secret
from protos.service.tls import WatchedFiles

TENANT_HEADER: Final = "x-tenant"

ANY_PRIORITY: Final = (-(2**31), 2**31 - 1)

_CALLER: Final = "triptych.caller"


class Account(NamedTuple):
    """How the scheduler treats a request: whom it charges, in which order, and which prefixes it shares."""

    tenant: str = ""
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Caller:
    """The rights of a key. The defaults apply where no keys are set."""

    name: str = ""
    """The key's name, for logs and metrics; empty: no key."""
    tenant: str = ""
    may_name_tenant: bool = True
    """Whether the header X-Tenant counts."""
    priorities: tuple[int, int] = ANY_PRIORITY
    """The lowest and the highest number that counts as `priority`."""
    is_admin: bool = False
    is_isolated: bool = False
    """Whether its tenant shares cached prefixes with no other tenant."""

    def account(self, headers: Headers, priority: int, cache_salt: str | None) -> Account:
        """Returns how the scheduler treats a request; ``priority`` is clamped to the caller's range.

        Raises:
            InvalidArgument: if the header X-Tenant counts and is invalid.
        """
        tenant = (tenant_of(headers) if self.may_name_tenant else "") or self.tenant
        lowest, highest = self.priorities
        salt = cache_salt or ""
        if self.is_isolated:
            # A tenant's name has no NUL, so no two pairs are hashed alike.
            salt = hashlib.sha256(f"{tenant}\0{salt}".encode("utf-8", "surrogatepass")).hexdigest()
        return Account(tenant, min(max(priority, lowest), highest), salt)


NO_ACCOUNT: Final = Account()
"""The account of a request that says nothing about itself, where no keys are set."""

ANYONE: Final = Caller()
"""The caller of a request without a key, where none is needed."""


def tenant_of(headers: Headers) -> str:
    """Returns the tenant that the header X-Tenant names; empty for the common tenant.

    Raises:
        InvalidArgument: if the header appears twice, is too long, or is not printable UTF-8.
    """
    given = headers.getlist(TENANT_HEADER)
    if not given:
        return ""
    if len(given) > 1:
        raise InvalidArgument("there are several X-Tenant headers; send one", param="X-Tenant")
    raw = given[0].encode("latin-1")
    if len(raw) > MAX_NAME_BYTES:
        raise InvalidArgument(f"X-Tenant is longer than {MAX_NAME_BYTES} bytes; shorten it", param="X-Tenant")
    try:
        tenant = raw.decode()
    except UnicodeDecodeError:
        raise InvalidArgument("X-Tenant is not UTF-8", param="X-Tenant") from None
    if not tenant.isprintable():
        raise InvalidArgument("X-Tenant has unprintable characters; remove them", param="X-Tenant")
    return tenant


def set_caller(scope: MutableMapping[str, Any], caller: Caller) -> None:
    """Notes who sent the request of ``scope``."""
    scope[_CALLER] = caller


def caller_of(request: Request) -> Caller:
    """Returns who sent the request."""
    caller: Caller = request.scope.get(_CALLER, ANYONE)
    return caller


def account_of(request: Request, priority: int = 0, cache_salt: str | None = None) -> Account:
    """Returns how the scheduler treats the request; :meth:`Caller.account` says more."""
    return caller_of(request).account(request.headers, priority, cache_salt)


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
    """A key of the file."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
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
    keys: list[KeyEntry] = Field(min_length=1)

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
    content = read_secret(path, "--api-key-file", _MOST_BYTES + 1)
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
    first = error.errors(include_url=False, include_input=False)[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    text = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if first["type"] == "model_type":
        text = "should have fields, such as `name`" if place else "should have a list `keys`"
    return f"{place.removeprefix('.')} {text[0].lower()}{text[1:]}".strip()


@dataclass(frozen=True, slots=True)
class Key:
    """A key."""

    digest: bytes
    """Its SHA-256. The key itself is not kept."""
    caller: Caller
    limiter: KeyLimiter | None = None
    """Counts its use; ``None``: no limits."""


class KeyStore:
    """Finds the key that a request shows. A changed file counts from the next request on."""

    def __init__(
        self, fixed: Sequence[Key], path: Path | None, clock: Callable[[], float], ledger: SharedLedger | None
    ) -> None:
        """Reads the file.

        Args:
            fixed: keys of the settings.
            path: the file of further keys.
            clock: monotonic seconds, the same in all processes of the ledger.
            ledger: counts the use of keys in several gateways; ``None``: this process counts alone.

        Raises:
            ConfigurationRefused: if the file is wrong.
        """
        self._fixed = fixed
        self._clock = clock
        self._ledger = ledger
        self._limiters: dict[str, KeyLimiter] = {}
        # Keys without a shared page, which this process counts in its memory.
        self._alone = set[str]()
        self._keys = fixed
        self._reading: asyncio.Task[None] | None = None
        self._file = None if path is None else WatchedFiles((path,), lambda: self._read(path))
        if self._file is not None:
            self._adopt(self._file.get(), must_share=True)

    @classmethod
    def from_settings(
        cls, settings: SecuritySettings, clock: Callable[[], float], shared: Path | None = None
    ) -> Self:
        """Returns the keys of a gateway; several gateways count together in the folder ``shared``."""
        fixed = []
        for number, key in enumerate(settings.api_key, start=1):
            name = f"api-key-{number}"
            rights = replace(ANYONE, name=name, tenant=name, may_name_tenant=False, is_isolated=True)
            fixed.append(Key(digest_of(key.get_secret_value()), rights))
        guards = bool(fixed) or settings.api_key_file is not None
        if settings.admin_api_key is not None:
            # Where requests need no key, the admin's are treated as any other.
            tenant = "admin" if guards else ""
            rights = Caller(name="admin", tenant=tenant, is_admin=True, is_isolated=guards)
            fixed.append(Key(digest_of(settings.admin_api_key.get_secret_value()), rights))
        # Keys of settings have no limits.
        ledger = None if shared is None or settings.api_key_file is None else SharedLedger(shared)
        return cls(fixed, settings.api_key_file, clock, ledger)

    @property
    def guards(self) -> bool:
        """Whether requests need a key. An admin key alone opens the admin's routes and closes no other."""
        return self._file is not None or any(key.caller.is_isolated for key in self._fixed)

    @property
    def has_admin(self) -> bool:
        """Whether any key has admin rights."""
        return any(key.caller.is_admin for key in self._keys)

    def find(self, given: Iterable[str]) -> Key | None:
        """Returns the first key among ``given``, in a time that reveals nothing about the keys."""
        if not self._keys:
            return None
        digests, found = [digest_of(text) for text in given], None
        for key in self._keys:
            for digest in digests:
                if hmac.compare_digest(key.digest, digest):
                    found = found or key
        return found

    async def refresh(self) -> None:
        """Reads the file if it has changed, in a thread; all requests wait for it meanwhile."""
        if self._reading is None:
            if self._file is None or not self._file.have_changed():
                return
            self._reading = asyncio.create_task(self._read_again(self._file))
        # A client that leaves must not end what others wait for.
        await asyncio.shield(self._reading)

    async def _read_again(self, file: "WatchedFiles[Sequence[KeyEntry]]") -> None:
        version = file.version
        try:
            entries = await asyncio.to_thread(file.get)
            if file.version != version:
                self._adopt(entries, must_share=False)
        except ConfigurationRefused as error:
            get_logger().warning("files_not_reloaded", reason=error.message, using="what they held before")
        finally:
            self._reading = None

    def _read(self, path: Path) -> Sequence[KeyEntry]:
        entries = read_key_file(path)
        names, digests = {key.caller.name for key in self._fixed}, {key.digest for key in self._fixed}
        for entry in entries:
            if entry.name in names or entry.digest in digests:
                raise ConfigurationRefused(
                    f"the key file {path} is wrong: the settings have a key like '{entry.name}' already; choose"
                    " another name and another key"
                )
        return entries

    def _adopt(self, entries: Sequence[KeyEntry], *, must_share: bool) -> None:
        """Adopts the keys of the file, in addition to those of the settings.

        With ``must_share``, a key without a shared page is refused. A later change is adopted in any case: a
        revoked key must not stay valid because a disk is full.
        """
        limiters = {entry.name: self._limiter(entry.name, entry.limits, must_share) for entry in entries}
        self._limiters = {name: limiter for name, limiter in limiters.items() if limiter is not None}
        self._keys = [
            *self._fixed,
            *(Key(entry.digest, entry.caller, limiters[entry.name]) for entry in entries),
        ]

    def _limiter(self, name: str, limits: Limits, must_share: bool) -> KeyLimiter | None:
        if limits == Limits():
            return None
        old = self._limiters.get(name)
        if old is None or name in self._alone:
            try:
                page = self._ledger.page(name) if self._ledger else Page()
                self._alone.discard(name)
                return KeyLimiter(name, limits, self._clock, page)
            except ConfigurationRefused as error:
                if must_share:
                    raise
                self._alone.add(name)
                get_logger().warning("key_counted_by_this_gateway_alone", key=name, reason=error.message)
        if old is None:
            return KeyLimiter(name, limits, self._clock, Page())
        old.set_limits(limits)
        return old
