"""All keys of a gateway: those of its settings and those of its file."""

import asyncio
import hmac
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from gateway.auth.identity import ANYONE, Caller
from gateway.auth.key_file import KeyEntry, digest_of, read_key_file
from gateway.auth.rate_limits import KeyLimiter, Ledger, Limits, SharedLedger
from gateway.security_settings import SecuritySettings
from protos.errors import ConfigurationRefused
from protos.logs import get_logger
from protos.security.watched_files import WatchedFiles


@dataclass(frozen=True, slots=True)
class Key:
    """One key."""

    digest: bytes
    """Its SHA-256. The key itself is not kept."""
    caller: Caller
    limiter: KeyLimiter | None = None
    """Counts what it uses; ``None``: it has no limits."""


class KeyStore:
    """Finds the key that a request shows. A changed file counts from the next request on."""

    def __init__(
        self, fixed: Sequence[Key], path: Path | None, clock: Callable[[], float], ledger: Ledger
    ) -> None:
        """Reads the file.

        Args:
            fixed: keys that no file changes.
            path: the file of the other keys, if there is one.
            clock: monotonic seconds, the same in all processes that share the ledger.
            ledger: where it is counted what keys use.

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
    def of(cls, settings: SecuritySettings, clock: Callable[[], float], shared: Path | None = None) -> Self:
        """Returns the keys of a gateway.

        Args:
            settings: the gateway's.
            clock: monotonic seconds.
            shared: the folder where several gateways count together what keys use.

        Raises:
            ConfigurationRefused: if the file of keys is wrong.
        """
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
        ledger = Ledger() if shared is None or settings.api_key_file is None else SharedLedger(shared)
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
        """Returns the first key that is among ``given``.

        The time does not depend on which key it is, nor on how much of one is right.
        """
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
        """Uses the keys of the file from now on, beside those of the settings.

        Args:
            entries: the keys.
            must_share: whether a key without a shared page is refused. A later change counts in any case: a
                revoked key must not stay valid because a disk is full.

        Raises:
            ConfigurationRefused: as the ledger does, if `must_share`.
        """
        limiters = {entry.name: self._limiter(entry.name, entry.limits, must_share) for entry in entries}
        self._limiters = {name: limiter for name, limiter in limiters.items() if limiter is not None}
        self._keys = [
            *self._fixed,
            *(Key(entry.digest, entry.caller, limiters[entry.name]) for entry in entries),
        ]

    def _limiter(self, name: str, limits: Limits, must_share: bool) -> KeyLimiter | None:
        """Returns the limiter of a key, which remembers what the key has used before."""
        if limits == Limits():
            return None
        old = self._limiters.get(name)
        if old is None or name in self._alone:
            try:
                page = self._ledger.page(name)
                self._alone.discard(name)
                return KeyLimiter(name, limits, self._clock, page)
            except ConfigurationRefused as error:
                if must_share:
                    raise
                self._alone.add(name)
                get_logger().warning("key_counted_by_this_gateway_alone", key=name, reason=error.message)
        if old is None:
            return KeyLimiter(name, limits, self._clock, Ledger().page(name))
        old.set_limits(limits)
        return old
