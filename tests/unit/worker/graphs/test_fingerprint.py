"""The fields that compiled code is found by: they cover whatever the code depends on, and nothing else."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file

from protos.steps import PoolShape
from tests.support.worker.layerless import GROUPS
from worker_svc.devices.cpu.device import CpuDevice
from worker_svc.graphs.compile_cache import key_of
from worker_svc.graphs.fingerprint import code_fields
from worker_svc.ranks.layout import RankLayout
from worker_svc.shapes import PoolingDescription, PoolShapeConfig, ShapeConfig

SIZES = ShapeConfig(32, 2, 8, 16, (1, 2), (5, 5))


class ConstantWeights(CpuDevice):
    """A device with the weights and the number of blocks in its compiled code."""

    weights_are_constants: ClassVar[bool] = True
    caches_are_inputs: ClassVar[bool] = True


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of a model."""
    write_config(tmp_path, hidden_size=8)
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    return tmp_path


def write_config(folder: Path, **fields: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": ["Tiny"], **fields}))


def key(folder: Path, **changed: Any) -> str:
    """Returns the key of the code for a model."""
    arguments: dict[str, Any] = {
        "device": CpuDevice(), "level": 2, "dtype": "bfloat16", "quantization": None, "groups": GROUPS,
        "shapes": SIZES, "sizes": None, "layout": RankLayout(), **changed,
    }  # fmt: skip
    return key_of(code_fields(folder, **arguments))


@pytest.mark.parametrize(
    "changed",
    [
        {"level": 3},
        {"dtype": "float32"},
        {"quantization": "awq"},
        {"groups": GROUPS[:1]},
        {"sizes": (2,)},
        {"dummy_seed": 0},
        {"layout": RankLayout(1, 2, 1)},
        {"layout": RankLayout(0, 1, 2)},
        {"shapes": replace(SIZES, chunk=16)},
        {"shapes": replace(SIZES, decode_buckets=(2,))},
        {"shapes": replace(SIZES, block_size=32)},
        {"shapes": replace(SIZES, max_model_len=16)},
    ],
)
def test_every_part_of_a_configuration_counts(folder: Path, changed: dict[str, Any]) -> None:
    assert key(folder, **changed) != key(folder) == key(folder)


def test_a_models_files_count(folder: Path) -> None:
    before = key(folder)
    write_config(folder, hidden_size=8, transformers_version="5", _name_or_path="elsewhere")
    assert key(folder) == before
    (folder / "modeling.py").write_text("x = 1")
    with_code = key(folder)
    assert with_code != before
    write_config(folder, hidden_size=16)
    assert key(folder) != with_code


def test_weights_count_by_value_only_where_code_contains_them(folder: Path) -> None:
    """Elsewhere only their names, shapes and types count; the same holds for blocks and made-up weights."""
    plain, constant = CpuDevice(), ConstantWeights()
    more_blocks = replace(SIZES, num_blocks=(6, 6))
    before = {device: key(folder, device=device) for device in (plain, constant)}
    assert key(folder, shapes=more_blocks) == before[plain]
    assert key(folder, device=constant, shapes=more_blocks) != before[constant]
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    assert key(folder) == before[plain]
    assert key(folder, device=constant) != before[constant]
    assert key(folder, dummy_seed=1) == key(folder, dummy_seed=2)
    assert key(folder, device=constant, dummy_seed=1) != key(folder, device=constant, dummy_seed=2)
    save_file({"b": torch.ones(2)}, folder / "model.safetensors")
    assert key(folder) != before[plain]


def test_what_a_pooling_model_does_after_its_layers_counts(folder: Path) -> None:
    """Shapes, the method and the layers that follow pooling tell code apart; the order of shapes does not."""
    small, large = PoolShape(16, 1), PoolShape(32, 4)
    sizes = PoolShapeConfig((small, large))
    mean = PoolingDescription("MEAN", 8)
    given: dict[str, Any] = {"groups": (), "shapes": sizes, "pooling": mean}
    base = key(folder, **given)
    assert key(folder, **given | {"shapes": PoolShapeConfig((large, small))}) == base
    assert key(folder, **given | {"pooling": replace(mean, activates=False)}) == base
    assert key(folder, **given | {"shapes": PoolShapeConfig((small,))}) != base
    assert key(folder, **given | {"pooling": replace(mean, method="CLS")}) != base
    dense = folder / "2_Dense" / "model.safetensors"
    dense.parent.mkdir()
    save_file({"linear.weight": torch.zeros(2, 2)}, dense)
    narrow = key(folder, **given)
    save_file({"linear.weight": torch.zeros(4, 2)}, dense)
    assert len({base, narrow, key(folder, **given)}) == 3
