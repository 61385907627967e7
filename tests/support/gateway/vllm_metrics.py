"""The metrics of the installed vLLM, read from its source: importing it takes longer than the tests."""

import ast
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_KINDS: Final = {"_gauge_cls": "gauge", "_counter_cls": "counter", "_histogram_cls": "histogram"}


@dataclass(frozen=True)
class VllmMetric:
    """One metric of vLLM's Prometheus logger."""

    kind: str
    labels: frozenset[str]
    bounds: Callable[[int], list[float]] | None
    """Returns the bounds of a histogram's buckets, given the longest sequence."""


def vllm_metrics() -> dict[str, VllmMetric]:
    """Returns all metrics that `v1/metrics/loggers.py` can export, by exported name."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    tree = ast.parse((root / "v1" / "metrics" / "loggers.py").read_text())
    families = {
        node.targets[0].id: node.value.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "histogram_buckets"
        and isinstance(node.value.args[0], ast.Constant)
    }
    return dict(_metrics(tree, families, root))


def _metrics(
    tree: ast.Module, families: Mapping[str, object], root: Path
) -> Iterator[tuple[str, VllmMetric]]:
    cache_labels = frozenset({*_fields(root / "config" / "cache.py", "CacheConfig"), "engine"})
    for node in ast.walk(tree):
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _KINDS
        ):
            continue
        arguments = {keyword.arg: keyword.value for keyword in node.keywords}
        kind, name = _KINDS[node.func.attr], arguments["name"]
        if isinstance(name, ast.Constant):
            labels = frozenset(_labels(arguments["labelnames"]))
            exported = f"{name.value!s}_total" if kind == "counter" else str(name.value)
        else:  # the only metric whose name is a variable
            labels, exported = cache_labels, "vllm:cache_config_info"
        bounds = (
            _bounds(str(families[ast.unparse(arguments["buckets"])]), root)
            if "buckets" in arguments
            else None
        )
        yield exported, VllmMetric(kind, labels, bounds)


def _labels(expression: ast.expr) -> list[str]:
    match expression:
        case ast.Name(id="labelnames"):
            return ["model_name", "engine"]
        case ast.BinOp(left=left, right=right):
            return _labels(left) + _labels(right)
        case ast.List(elts=parts):
            return [label for part in parts for label in _labels(part)]
        case ast.Constant(value=str(label)):
            return [label]
        case ast.Attribute(attr=name):
            return [name.removeprefix("labelname_")]
    raise AssertionError(ast.unparse(expression))


def _bounds(family: str, root: Path) -> Callable[[int], list[float]]:
    module = sys.modules.get("vllm_buckets")
    if module is None:
        spec = importlib.util.spec_from_file_location("vllm_buckets", root / "v1" / "metrics" / "buckets.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["vllm_buckets"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    buckets = module.histogram_buckets
    return lambda longest: list(buckets(family, max_model_len=longest))


def _fields(path: Path, name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == name:
            yield from (
                part.target.id
                for part in node.body
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
            )
