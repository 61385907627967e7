"""What a key lets its caller say: tenant, priority and cache salt."""

import pytest
from starlette.datastructures import Headers

from gateway.auth.key_store import ANYONE, Account, Caller

A = Caller(name="a", tenant="tenant-a", may_name_tenant=False, priorities=(0, 5), is_isolated=True)
PROXY = Caller(name="proxy", tenant="proxy", may_name_tenant=True, is_isolated=True)


@pytest.mark.parametrize(
    ("caller", "header", "priority", "expected"),
    [
        (ANYONE, "paid", -7, ("paid", -7)),
        (ANYONE, None, 0, ("", 0)),
        (A, "paid", -7, ("tenant-a", 0)),
        (A, None, 3, ("tenant-a", 3)),
        (A, None, 9, ("tenant-a", 5)),
        (PROXY, "paid", -7, ("paid", -7)),
        (PROXY, None, 0, ("proxy", 0)),
    ],
)
def test_a_key_decides_what_is_believed(
    caller: Caller, header: str | None, priority: int, expected: tuple[str, int]
) -> None:
    """X-Tenant counts only from keys that may name tenants; priorities stay within the key's range."""
    headers = Headers({} if header is None else {"x-tenant": header})
    account = caller.account(headers, priority, None)
    assert (account.tenant, account.priority) == expected


def test_isolated_tenants_share_no_salt() -> None:
    """The salt is a hash of the tenant and the request's own salt; without keys it is the request's own."""
    named = {
        PROXY.account(Headers({"x-tenant": tenant}), 0, salt).cache_salt
        for tenant in ("a", "b", "ab")
        for salt in (None, "b", "c")
    }
    assert len(named) == 9
    again = PROXY.account(Headers({"x-tenant": "a"}), 0, "b").cache_salt
    assert again in named
    assert len(again) == 64
    assert ANYONE.account(Headers({"x-tenant": "a"}), 0, "b") == Account("a", 0, "b")
    assert A.account(Headers({}), 0, None).cache_salt != ""


def test_a_tenant_that_does_not_count_is_not_checked() -> None:
    """A header that is ignored cannot make a request fail."""
    assert A.account(Headers({"x-tenant": "x" * 1000}), 0, None).tenant == "tenant-a"
