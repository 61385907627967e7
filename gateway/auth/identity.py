"""The caller of a request, and the rights of its key."""

import hashlib
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from starlette.datastructures import Headers
from starlette.requests import Request

from protos.errors import InvalidArgument
from protos.limits import MAX_NAME_BYTES

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
        """Returns how the scheduler treats a request of the caller.

        Args:
            headers: the request's.
            priority: the requested priority, clamped to the caller's range.
            cache_salt: the request's own salt.

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
