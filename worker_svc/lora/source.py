"""Finds an adapter's files: in a folder, or on the hub at a commit."""

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from protos.errors import InvalidArgument, NotFound, Unavailable
from worker_svc.lora.checkpoint import CONFIG, WEIGHTS

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

# A branch, tag or commit; nothing that leaves the hub's cache.
_REVISION = re.compile(r"(?!.*\.\.)[\w][\w./-]{0,255}")

# What the system answers to a process that may not write a folder, or finds no space there.
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class AdapterFiles:
    """Where an adapter's files are."""

    folder: Path
    """Has the configuration and the weights."""
    revision: str = ""
    """The commit of a hub's adapter; empty for a folder."""


def find_files(source: str, name: str, revision: str = "") -> AdapterFiles:
    """Returns an adapter's files, fetched if the source is an id of the hub.

    Args:
        source: a folder, or an id with or without a branch, tag or commit: ``org/adapter@revision``.
        name: the adapter's, for errors.
        revision: the commit to read instead, if the source is an id; empty: the source's.

    Raises:
        NotFound: if nothing is there.
        InvalidArgument: if the source is neither a path nor an id.
        Unavailable: if the hub cannot be reached, or its cache on this machine cannot be written.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return AdapterFiles(path)
    repository, at, wanted = source.partition("@")
    if source.startswith(("/", ".", "~")) or repository.count("/") != 1:
        raise NotFound(f"adapter {name}: there is no folder {source} on the worker", param="source")
    if at and not _REVISION.fullmatch(wanted):
        raise InvalidArgument(
            f"adapter {name}: {wanted!r} in {source} is not a branch, tag or commit", param="source"
        )
    folder = _download(repository, revision or wanted, source, name)
    return AdapterFiles(folder, folder.name)  # the hub's cache has a folder for each commit


def _download(repository: str, revision: str, source: str, name: str) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        return Path(
            snapshot_download(repository, revision=revision or None, allow_patterns=[CONFIG, WEIGHTS])
        )
    except HFValidationError as error:
        raise InvalidArgument(
            f"adapter {name}: {source} is neither a folder nor a Hugging Face id", param="source"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx.HTTPError, OSError) as error:
        causes = (error, error.__cause__)
        number = next((one.errno for one in causes if isinstance(one, OSError) and one.errno), 0)
        if number in _NOT_WRITABLE:
            raise Unavailable(
                f"adapter {name}: the worker cannot write the hub's cache ({os.strerror(number)}); let it write"
                " there, free space, or set HF_HUB_CACHE to another folder",
                param="source",
                retry_after_ms=5000,
            ) from error
        if any(isinstance(cause, HfHubHTTPError) and _is_refusal(cause) for cause in causes):
            reason = f"{source} is not a folder, and the hub does not have it"
        elif any(isinstance(cause, OfflineModeIsEnabled) for cause in causes):
            reason = f"{source} is not a folder, the hub's cache does not have it, and HF_HUB_OFFLINE is set"
        else:
            raise Unavailable(
                f"adapter {name}: {source} is not a folder, and the hub cannot be reached; retry,"
                " or pass a folder",
                param="source",
                retry_after_ms=5000,
            ) from error
        raise NotFound(f"adapter {name}: {reason}", param="source") from error


def _is_refusal(error: "HfHubHTTPError") -> bool:
    return error.response.status_code in (401, 403, 404)
