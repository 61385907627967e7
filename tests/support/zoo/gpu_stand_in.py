"""Builds models for a GPU on a machine without one: vLLM's platform and our layers are those of `cuda`.

Nothing runs. The program takes a JSON object of folders, by family, and prints what each was refused for, by
family; the text is empty if the model was built. vLLM loads one platform per process, so this is a process of
its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from protos.errors import ConfigurationRefused
from tests.support.paths import ROOT
from tests.support.zoo import families


def refusals(folders: Mapping[str, Path]) -> dict[str, str]:
    """Returns, by family, the line that device cuda refuses its model with, or an empty one."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.zoo.gpu_stand_in", json.dumps({name: str(each) for name, each in folders.items()})],
        check=False, capture_output=True, text=True, cwd=ROOT, timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _refusal(family: str, folder: str) -> str:
    from worker_svc.devices.cuda.device import CudaDevice
    from worker_svc.vllm_adapter.model import VllmModel

    class StandIn(CudaDevice):
        """Keeps its tensors on the host."""

        torch_device = torch.device("cpu")

    is_text = family in families.MULTIMODAL
    try:
        VllmModel(Path(folder), StandIn(), dtype="bfloat16", seed=0, language_model_only=is_text)
    except ConfigurationRefused as refused:
        return refused.message
    return ""


def main() -> None:
    """Runs the command."""
    from worker_svc.vllm_adapter import startup

    startup.prepare("cuda")
    from worker_svc.vllm_adapter.platform import TriptychCudaPlatform

    TriptychCudaPlatform.device_type = "cpu"
    folders: dict[str, str] = json.loads(sys.argv[1])
    print(json.dumps({family: _refusal(family, folder) for family, folder in folders.items()}))


if __name__ == "__main__":
    main()
