"""`triptych catalog`: lists, verifies, prunes and exports the entries of the compile cache."""

import json
import shutil
import sys
import time
from pathlib import Path

from protos.errors import ConfigurationRefused
from protos.service.help import ArgumentParser
from protos.service.settings import load
from worker_svc.devices.registry import DEVICES
from worker_svc.graphs.compile_cache import CompileCache, DamagedEntry, Manifest
from worker_svc.settings import Settings

_NO_ENTRIES = "no entries; run `triptych compile` to create them"


def main(argv: list[str]) -> int:
    """Returns the exit code: 0; 1 if entries are damaged; 2 for a bad flag or an unusable folder."""
    arguments = _parser().parse_args(argv)
    try:
        caches = _caches(arguments.compile_cache_dir)
        if arguments.command == "list":
            return _list(caches, as_json=arguments.json)
        if arguments.command == "verify":
            return _verify(caches)
        if arguments.command == "prune":
            return _prune(caches, days=arguments.older_than_days, keys=arguments.entry)
        return _export(caches, arguments.folder, keys=arguments.entry)
    except (ConfigurationRefused, OSError) as error:
        print(f"triptych catalog: {error}", file=sys.stderr)
        return 2


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="triptych catalog",
        description="Shows and maintains the compile cache, which has one entry for each configuration.",
    )
    parser.add_argument(
        "--compile-cache-dir", type=Path, metavar="DIR",
        help="the folder with the entries (default: the folders of all devices in the worker's settings)",
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    listing = commands.add_parser("list", help="print each entry with its configuration, size and age")
    listing.add_argument("--json", action="store_true", help="print JSON with all fields")
    commands.add_parser("verify", help="check every file of every entry")
    prune = commands.add_parser(
        "prune", help="remove damaged entries, unfinished folders and the entries that flags select"
    )
    prune.add_argument(
        "--older-than-days", type=float, metavar="N", help="also remove entries that are older"
    )
    prune.add_argument(
        "--entry", action="append", default=[], metavar="KEY", help="also remove this entry (repeatable)"
    )
    export = commands.add_parser("export", help="copy intact entries to a folder for another machine")
    export.add_argument("folder", type=Path, help="the other machine's --compile-cache-dir")
    export.add_argument(
        "--entry", action="append", default=[], metavar="KEY", help="copy only this entry (repeatable)"
    )
    return parser


def _caches(folder: Path | None) -> list[CompileCache]:
    if folder is not None:
        if not folder.is_dir():
            raise ConfigurationRefused(f"{folder} is not a folder; check --compile-cache-dir")
        return [CompileCache(folder)]
    settings = load(Settings, ["--model", "any"])
    folders = [settings.cache_folder(device) for device in DEVICES]
    return [CompileCache(each) for each in dict.fromkeys(folders) if each is not None]


def _list(caches: list[CompileCache], *, as_json: bool) -> int:
    entries = []
    damaged = 0
    for cache in caches:
        for key in cache.entries():
            try:
                manifest = cache.read(key)
            except DamagedEntry as error:
                print(f"triptych catalog: {error}", file=sys.stderr)
                damaged += 1
                continue
            if manifest is not None:
                entries.append((cache.root / key, manifest))
    if as_json:
        print(json.dumps([_described(folder, manifest) for folder, manifest in entries], indent=2))
        return 1 if damaged else 0
    if not entries and not damaged:
        print(_NO_ENTRIES)
    for folder, manifest in entries:
        get = manifest.fields.get
        mib = _mib(folder, manifest)
        age = (time.time() - manifest.created) / 86400
        print(f"{folder.name}  {mib:.1f} MiB, {age:.1f} days old, compiled in {manifest.seconds:.0f} s")
        print(f"  {get('model')} {get('dtype')} -O {get('level')} on {get('device')}")
        print(f"  {', '.join(manifest.graphs)}")
    return 1 if damaged else 0


def _described(folder: Path, manifest: Manifest) -> dict[str, object]:
    return {
        "entry": folder.name, "folder": str(folder), "mib": round(_mib(folder, manifest), 2),
        "created": manifest.created, "seconds": manifest.seconds, "graphs": list(manifest.graphs),
        "fields": dict(manifest.fields),
    }  # fmt: skip


def _mib(folder: Path, manifest: Manifest) -> float:
    sizes = [path.stat().st_size for name in manifest.files if (path := folder / name).is_file()]
    return sum(sizes) / 2**20


def _verify(caches: list[CompileCache]) -> int:
    damaged = 0
    for cache in caches:
        for key in cache.entries():
            try:
                cache.verify(key)
                print(f"{key} intact")
            except DamagedEntry as error:
                damaged += 1
                print(f"{key} damaged: {error}")
    return 1 if damaged else 0


def _prune(caches: list[CompileCache], *, days: float | None, keys: list[str]) -> int:
    unknown = set(keys)
    for cache in caches:
        for key in cache.entries():
            reason = _reason(cache, key, days, keys)
            unknown.discard(key)
            if reason:
                cache.remove(key)
                print(f"{key} removed: {reason}")
        if count := cache.remove_abandoned():
            print(f"{count} unfinished folders removed from {cache.root}")
    _refuse_unknown(unknown)
    return 0


def _refuse_unknown(keys: set[str]) -> None:
    if keys:
        listed = ", ".join(sorted(keys))
        raise ConfigurationRefused(f"no such entry: {listed}; `triptych catalog list` prints all")


def _reason(cache: CompileCache, key: str, days: float | None, keys: list[str]) -> str | None:
    if key in keys:
        return "selected by --entry"
    try:
        manifest = cache.verify(key)
    except DamagedEntry as error:
        return str(error)
    if manifest is not None and days is not None and time.time() - manifest.created > days * 86400:
        return f"older than {days:g} days"
    return None


def _export(caches: list[CompileCache], target: Path, *, keys: list[str]) -> int:
    found = [(cache, key) for cache in caches for key in cache.entries() if not keys or key in keys]
    _refuse_unknown(set(keys) - {key for _, key in found})
    if not found:
        print(_NO_ENTRIES)
    damaged = 0
    copies = CompileCache(target)
    for cache, key in found:
        try:
            manifest = cache.verify(key)
        except DamagedEntry as error:
            damaged += 1
            print(f"{key} left out: {error}", file=sys.stderr)
            continue
        if manifest is None or _is_intact(copies, key):
            continue
        folder = copies.begin(manifest.fields)
        for name in manifest.files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(cache.root / key / name, folder / name)
        copies.commit(folder, manifest.fields, manifest.graphs, manifest.seconds)
        print(f"{key} exported to {target}")
    return 1 if damaged else 0


def _is_intact(cache: CompileCache, key: str) -> bool:
    try:
        return cache.verify(key) is not None
    except DamagedEntry:
        return False
