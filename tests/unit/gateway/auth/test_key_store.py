"""Keys of settings and of the file, and the rights of callers."""

import asyncio
import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from gateway.auth import key_store
from gateway.auth.key_store import ANY_PRIORITY, ANYONE, Account, Caller, KeyStore, read_key_file
from gateway.auth.rate_limits import KeyLimiter
from gateway.settings import Settings
from protos.errors import ConfigurationRefused, Overloaded
from protos.service.settings import load

PLAIN = "sk-very-secret"
YAML = f"""
# two keys
keys:
  - name: chat
    key: {PLAIN}
    tenant: team-1
    max_priority: 10
    requests_per_minute: 60
  - name: ops
    sha256: {hashlib.sha256(b"sk-ops").hexdigest()}
    admin: true
    may_name_tenant: true
"""


def ring(*flags: str) -> KeyStore:
    return KeyStore.from_settings(load(Settings, [*flags]), lambda: 0.0)


def caller(keys: KeyStore, *shown: str) -> Caller | None:
    key = keys.find(shown)
    return None if key is None else key.caller


def test_keys_of_settings() -> None:
    """Each key of --api-key is a tenant of its own and may use any priority; only the admin's has rights."""
    keys = ring("--api-key", "one", "two", "--admin-api-key", "root")
    assert keys.guards
    assert keys.has_admin
    assert caller(keys, "one") == Caller("api-key-1", "api-key-1", False, ANY_PRIORITY, False, True)
    assert caller(keys, "wrong", "two") == Caller("api-key-2", "api-key-2", False, ANY_PRIORITY, False, True)
    assert caller(keys, "root") == Caller("admin", "admin", True, ANY_PRIORITY, True, True)
    assert caller(keys) is caller(keys, "") is caller(keys, "on", "onee", "TWO") is None


async def test_a_changed_file_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys come and go; a key that stays remembers what it has used; a bad file changes nothing."""
    path = tmp_path / "keys.yaml"
    path.write_text(YAML)
    keys = ring("--api-key-file", str(path))
    chat = keys.find([PLAIN])
    assert chat is not None
    assert chat.limiter is not None
    chat.limiter.admit()
    path.write_text(
        YAML.replace("name: ops", "name: operations").replace("max_priority: 10", "max_priority: 3")
    )
    await keys.refresh()
    again = keys.find([PLAIN])
    assert again is not None
    assert (again.caller.priorities, again.limiter) == ((0, 3), chat.limiter)
    assert getattr(caller(keys, "sk-ops"), "name", None) == "operations"
    capsys.readouterr()
    for content in (f"keys: [{{name: x, key: [{PLAIN}]}}]", f"keys: {PLAIN}: [", ""):
        path.write_text(content)
        for _ in range(2):
            await keys.refresh()
            assert keys.find([PLAIN]) is again
        log = capsys.readouterr().out
        assert log.count("files_not_reloaded") == 1
        assert PLAIN not in log
    path.unlink()
    await keys.refresh()
    assert keys.find([PLAIN]) is again
    assert "No such file" in capsys.readouterr().out
    path.write_text(json.dumps({"keys": [{"name": "new", "key": "sk-new"}]}))
    await keys.refresh()
    assert caller(keys, PLAIN) is None
    assert caller(keys, "sk-new") is not None


async def test_a_revoked_key_is_refused_though_limits_cannot_be_shared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new key is counted in memory, with a warning, until the shared folder can be used again."""
    path, shared = tmp_path / "keys.yaml", tmp_path / "shared"
    flags = ["--api-key-file", str(path)]
    entry = {"name": "new", "key": "sk-new", "max_concurrent_requests": 1}

    async def change(**limits: int) -> KeyLimiter:
        path.write_text(json.dumps({"keys": [entry | limits]}))
        await keys.refresh()
        assert caller(keys, PLAIN) is None
        new = keys.find(["sk-new"])
        assert new is not None
        assert new.limiter is not None
        return new.limiter

    path.write_text(YAML)
    keys = KeyStore.from_settings(load(Settings, flags), lambda: 0.0, shared)
    shared.rename(tmp_path / "aside")
    alone = await change()
    log = capsys.readouterr().out
    assert log.count("key_counted_by_this_gateway_alone") == 1
    assert "cannot count in" in log
    alone.admit()
    assert await change(tokens_per_minute=5) is alone
    with pytest.raises(Overloaded):
        alone.admit()
    (tmp_path / "aside").rename(shared)
    assert await change(tokens_per_minute=50) is not alone
    assert (shared / "new.used").exists()
    shared.rename(tmp_path / "aside")
    shared.write_text("no folder")
    with pytest.raises(ConfigurationRefused, match="cannot count in"):
        KeyStore.from_settings(load(Settings, flags), lambda: 0.0, shared)


async def test_all_requests_wait_for_a_changed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read once, in a thread, and a client that leaves does not end what the others wait for."""
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"name": "a", "key": "sk-a"}]}))
    keys = ring("--api-key-file", str(path))
    may_read, readers = threading.Event(), []

    def slow(path: Path) -> Any:
        readers.append(threading.current_thread())
        assert may_read.wait(5)
        return read_key_file(path)

    monkeypatch.setattr(key_store, "read_key_file", slow)
    path.write_text(json.dumps({"keys": [{"name": "new", "key": "sk-new"}]}))
    waiting = [asyncio.create_task(keys.refresh()) for _ in range(3)]
    while not readers:
        await asyncio.sleep(0)
    late = asyncio.create_task(keys.refresh())
    waiting[0].cancel()
    await asyncio.sleep(0)
    assert not late.done()
    may_read.set()
    await asyncio.gather(*waiting[1:], late)
    assert caller(keys, "sk-a") is None
    assert caller(keys, "sk-new") is not None
    assert len(readers) == 1
    assert readers[0] is not threading.main_thread()


GOOD: dict[str, Any] = {"name": "a", "key": PLAIN}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("keys: []", "keys list should have at least 1 item"),
        ("[]", "is wrong: should have a list `keys`"),
        (f"keys: [{PLAIN}", "is neither YAML nor JSON at line 2, column 1"),
        ("keys: [{name: a, key: 2026-13-45}]", "is neither YAML nor JSON"),
        (json.dumps({"keys": [GOOD], "key": PLAIN}), "key extra inputs are not permitted"),
        (json.dumps({"keys": [GOOD | {"key": 7}]}), "keys[0].key should be a valid string"),
        ("", "is wrong: should have a list `keys`"),
        ("keys: [a]", "is wrong: keys[0] should have fields, such as `name`"),
        (json.dumps({"keys": [GOOD | {"sha256": PLAIN}]}), "keys[0].sha256 string should match pattern"),
        (json.dumps({"keys": [GOOD | {"sha256": "0" * 64}]}), "keys[0] needs either 'key' or 'sha256'"),
        (json.dumps({"keys": [{"name": "a"}]}), "keys[0] needs either 'key' or 'sha256'"),
        (json.dumps({"keys": [GOOD | {"name": "a b"}]}), "keys[0].name string should match pattern"),
        (json.dumps({"keys": [GOOD | {"tenant": "ä" * 129}]}), "keys[0].tenant should be printable"),
        (json.dumps({"keys": [GOOD | {"min_priority": 2}]}), "keys[0] has min_priority above max_priority"),
        (json.dumps({"keys": [GOOD | {"tokens_per_minute": 0}]}), "keys[0].tokens_per_minute should be"),
        (json.dumps({"keys": [GOOD, GOOD]}), "names 'a' twice"),
        (json.dumps({"keys": [GOOD, GOOD | {"name": "b"}]}), "gives 'a' and 'b' the same key"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    """One line names the file, the place and the reason, and repeats no value."""
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(ConfigurationRefused) as refused:
        read_key_file(path)
    text = str(refused.value)
    assert reason in text
    assert str(path) in text
    assert PLAIN not in text
    assert "\n" not in text


@pytest.mark.parametrize("entry", [{"name": "api-key-1", "key": "x"}, {"name": "b", "key": "one"}])
def test_a_file_repeats_no_key_of_the_settings(tmp_path: Path, entry: dict[str, str]) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [entry]}))
    with pytest.raises(ConfigurationRefused, match="the settings have a key like"):
        ring("--api-key", "one", "--api-key-file", str(path))


A = Caller(name="a", tenant="tenant-a", may_name_tenant=False, priorities=(0, 5), is_isolated=True)
PROXY = Caller(name="proxy", tenant="proxy", may_name_tenant=True, is_isolated=True)


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
