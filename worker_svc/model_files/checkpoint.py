"""Reads the headers of safetensors files, checks their completeness and hashes their contents."""

import contextlib
import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open

from protos.errors import ConfigurationRefused
from protos.service import private_files
from protos.service.logs import get_logger

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
# A second copy of the weights by some authors, and LoRA adapters.
_OTHERS = ("consolidated", "adapter_model")
_PICKLES = ("*.bin", "*.pt", "*.pth")
# Floating-point types that --dtype converts, with their bytes.
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# How the names of numbers in MXFP4 end; see `stored_tensors.Mxfp4Experts`.
_MXFP4 = "_blocks"


@dataclass(frozen=True)
class Tensor:
    """The header entry of a tensor."""

    kind: str
    """Element type, as safetensors names it: for example "BF16"."""
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file. Names of types contain their bits; a "BOOL" takes a byte."""
        bits = re.search(r"\d+", self.kind)
        return self.num_elements * (int(bits[0]) if bits else 8) // 8


@contextlib.contextmanager
def reading(path: Path, framework: str = "pt") -> Iterator[Any]:
    """Opens a file of tensors; refuses one that cannot be read or is damaged."""
    try:
        with safe_open(path, framework) as file:
            yield file
    except OSError as error:
        raise ConfigurationRefused(f"cannot read {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise ConfigurationRefused(f"{path} is damaged: {error}; fetch it again") from error


@dataclass(frozen=True)
class Shard:
    """A file whose length matches its header."""

    path: Path
    tensors: Mapping[str, Tensor]
    """By name."""

    @classmethod
    def open(cls, path: Path) -> Self:
        """Reads the header; refuses a file that cannot be read or is damaged."""
        with reading(path, "np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        return cls(
            path,
            {name: Tensor(each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()},
        )

    def read(self, name: str) -> Any:
        """Returns a tensor with its numbers."""
        with reading(self.path) as file:
            return file.get_tensor(name)


@dataclass(frozen=True)
class Checkpoint:
    """The weight files of a model."""

    shards: tuple[Shard, ...]
    """At least one, ordered by name."""
    ignored: tuple[str, ...] = ()
    """Names of the folder's other safetensors files, ordered."""

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Finds a folder's weights and checks that they are complete.

        Raises:
            ConfigurationRefused: if there are no weights, only pickled weights, or some are missing.
        """
        found = sorted(folder.glob("*.safetensors"))
        index = folder / _INDEX
        # As in transformers, the single file comes before an index, which may be older.
        by_index = index.is_file() and not (folder / _SINGLE).is_file()
        shards = cls._indexed(folder, index) if by_index else _distinct([*map(Shard.open, _weights(found))])
        if shards:
            taken = {shard.path for shard in shards}
            return cls(tuple(shards), tuple(path.name for path in found if path not in taken))
        pickled = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        if pickled:
            raise ConfigurationRefused(
                f"{folder} has only pickled weights ({pickled[0]}), and unpickling runs code;"
                " convert them to safetensors"
            )
        raise ConfigurationRefused(
            f"{folder} has no weights (*.safetensors); add them,"
            " or use --load-format dummy for made-up weights"
        )

    @staticmethod
    def _indexed(folder: Path, index: Path) -> list[Shard]:
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
            # An index is untrusted data: it may name files of this folder only.
            foreign = [name for name in names if Path(name).name != name]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationRefused(f"{index} cannot be read; fetch it again") from error
        if not names or foreign:
            raise ConfigurationRefused(
                f"{index} names {f'{foreign[0]}, which is outside its folder' if foreign else 'no files'};"
                " fetch it again"
            )
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ConfigurationRefused(
                f"{folder} lacks {len(missing)} of {len(names)} files that {index.name} names,"
                f" first {missing[0]}; fetch them"
            )
        shards = {name: Shard.open(folder / name) for name in names}
        for tensor, name in weight_map.items():
            if tensor not in shards[name].tensors:
                raise ConfigurationRefused(
                    f"{folder / name} has no tensor {tensor}, which {index.name} places there;"
                    " fetch both again"
                )
        # A tensor that the index places elsewhere is an old copy.
        return [
            Shard(
                shard.path,
                {key: each for key, each in shard.tensors.items() if weight_map.get(key, name) == name},
            )
            for name, shard in shards.items()
        ]

    def num_bytes(self, itemsize: int | None = None) -> int:
        """Returns the bytes of all weights, as stored or with `itemsize` bytes per floating-point element.

        Experts in MXFP4 count dequantized: two elements a byte, in bfloat16 without an `itemsize`.
        """

        def bytes_of(name: str, tensor: Tensor) -> int:
            if name.endswith(_MXFP4) and tensor.kind == "U8":
                return 2 * tensor.num_elements * (itemsize or _FLOATS["BF16"])
            return tensor.num_elements * itemsize if itemsize and tensor.kind in _FLOATS else tensor.num_bytes

        return sum(bytes_of(*each) for shard in self.shards for each in shard.tensors.items())


def _distinct(shards: list[Shard]) -> list[Shard]:
    """Returns the files; refuses a tensor in two of them."""
    places: dict[str, Path] = {}
    for shard in shards:
        for name in shard.tensors:
            if (other := places.setdefault(name, shard.path)) != shard.path:
                raise ConfigurationRefused(
                    f"tensor {name} is in both {other} and {shard.path.name}; remove the file that does not belong"
                    f" to the model, or add its {_INDEX}"
                )
    return shards


def _weights(found: list[Path]) -> list[Path]:
    """Returns the weights among a folder's safetensors files without an index, as transformers chooses."""
    own = [path for path in found if not path.name.startswith(_OTHERS)]
    single = [path for path in own if path.name == _SINGLE]
    shards = [path for path in own if _SHARD.fullmatch(path.name)]
    copies = [path for path in found if path.name.startswith(_OTHERS[0])]
    return single or _all_parts(shards) or own or copies


def _all_parts(shards: list[Path]) -> list[Path]:
    """Returns the files; refuses them if their names say that one is missing."""
    for path in shards:
        match = _SHARD.fullmatch(path.name)
        assert match is not None
        name, number, count = match.groups()
        for each in range(1, int(count) + 1):
            part = path.with_name(f"{name}-{each:0{len(number)}}-of-{count}.safetensors")
            if part not in shards:
                raise ConfigurationRefused(f"{path.parent} lacks {part.name}; fetch it")
    return shards


_DIGEST = re.compile(r"[0-9a-f]{64}")


def start_digest(weight_files: Sequence[Path], cache: Path) -> Future[str]:
    """Digests names and contents of weight files on a separate thread, during imports and loading.

    A file's digest comes, in this order, from the name of a Hugging Face blob, from the cache, or from all of
    its bytes. The cache's folder need not exist; if it cannot be written or others may change it, each start
    reads the files.

    Returns:
        64 hexadecimal digits, equal for equal weights. The result raises `ConfigurationRefused` if a file
        cannot be read.
    """
    found: Future[str] = Future()

    def work() -> None:
        try:
            found.set_result(_digest(weight_files, cache))
        except OSError as error:
            found.set_exception(ConfigurationRefused(f"cannot read the weights: {error}"))
        except Exception as error:  # noqa: BLE001 - the caller waits for the result
            found.set_exception(error)

    # A process that stops does not wait for a daemon thread, which may have gigabytes left to read.
    threading.Thread(target=work, name="weights-digest", daemon=True).start()
    return found


def dummy_digest(seed: int, device: str) -> str:
    """Returns the digest of made-up weights, which depend on the seed and on the device's generator."""
    return hashlib.sha256(f"made up, seed {seed}, {device}".encode()).hexdigest()


def _digest(weight_files: Sequence[Path], cache: Path) -> str:
    kept: Path | None = cache
    with contextlib.suppress(OSError):  # it does not exist yet
        try:
            private_files.check(cache, "the cache of digests", "change --compile-cache-root")
        except ConfigurationRefused as error:
            get_logger().warning("weights_digest_not_kept", file=str(cache), reason=error.message)
            kept = None
    digest = hashlib.sha256()
    for path in sorted(weight_files):
        digest.update(f"{_file_digest(path, kept)} {path.name}\n".encode())
    return digest.hexdigest()


def _file_digest(path: Path, cache: Path | None) -> str:
    content = path.resolve()
    # The hub's cache names large files by their SHA-256.
    if content.parent.name == "blobs" and _DIGEST.fullmatch(content.name):
        return content.name
    if cache is None:
        return _read(content)
    stat = content.stat()
    # Every write changes the time of change, which no program can set.
    key = f"{content}\0{stat.st_dev}\0{stat.st_ino}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}"
    entry = cache / hashlib.sha256(key.encode()).hexdigest()
    try:
        known = entry.read_text()
    except (OSError, ValueError):
        known = ""
    return known if _DIGEST.fullmatch(known) else _read_and_keep(content, entry)


def _read(content: Path) -> str:
    with content.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_and_keep(content: Path, entry: Path) -> str:
    found = _read(content)
    unfinished = entry.with_suffix(f".{os.getpid()}")
    try:
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        private_files.write_text(unfinished, found)
        unfinished.replace(entry)
    except OSError as error:
        get_logger().warning("weights_digest_not_kept", file=str(entry), reason=error.strerror)
    return found
