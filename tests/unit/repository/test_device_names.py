"""Only the folder of devices names a device; all other code asks the registry or the device."""

import ast

import pytest

from tests.support.paths import PACKAGES, ROOT, sources
from worker_svc.devices.registry import DEVICES

FOLDER = ROOT / "worker_svc" / "devices"
# A section of the report of `triptych env`.
OTHER_MEANINGS = {("deploy/commands/env.py", "cpu")}


def is_host_tensor(call: ast.Call) -> bool:
    """Whether a call puts a tensor into the host's memory, as `torch.empty(…, device="cpu")` does."""
    return isinstance(call.func, ast.Attribute) and (
        call.func.attr == "to" or any(keyword.arg == "device" for keyword in call.keywords)
    )


def named(tree: ast.AST) -> set[str]:
    """Returns the devices that code names, apart from the host's tensors."""
    tensors = {
        id(node)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and is_host_tensor(call)
        for node in ast.walk(call)
        if isinstance(node, ast.Constant) and node.value == "cpu"
    }
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value in DEVICES
        and id(node) not in tensors
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_devices_are_named_in_their_folder_alone(package: str) -> None:
    """A new device is a row of the registry and a folder."""
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in sources(package)
        if not path.is_relative_to(FOLDER)
        for name in named(ast.parse(path.read_text()))
    }
    assert found - OTHER_MEANINGS == set()


def test_names_in_code_are_found() -> None:
    """A comparison counts; a tensor on the host does not."""
    assert named(ast.parse('device.name == "cuda"')) == {"cuda"}
    assert named(ast.parse('torch.device("cuda")')) == {"cuda"}
    assert named(ast.parse('torch.zeros(2, device="cpu"); states.to("cpu")')) == set()
