"""The table in docs/models.md is that of the code: its small models, its refusals and its tests."""

from pathlib import Path

import pytest
from transformers.models.auto import modeling_auto

from tests.support.paths import ROOT
from tests.support.zoo import families
from tests.support.zoo.gpu_stand_in import refusals
from tests.support.zoo.table import REFUSALS, ROWS, Row
from worker_svc.vllm_adapter.configuration import TEXT_MODELS

SMALL = families.FAMILIES | families.MULTIMODAL


def test_every_small_model_is_in_one_row() -> None:
    assert sorted(family for row in ROWS for family in row.families) == sorted(SMALL)
    assert set(families.NOT_ON_NPU) <= set(SMALL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # importing transformers
def test_a_gpu_refuses_what_the_table_says(tmp_path: Path) -> None:
    """Device cuda refuses these families by name, and builds another one with experts."""
    names = (*families.NOT_ON_GPU, "mixtral")
    found = refusals({family: families.write(family, tmp_path / family) for family in names})
    assert found.pop("mixtral") == ""
    assert found.keys() == families.NOT_ON_GPU.keys()
    for family, reason in families.NOT_ON_GPU.items():
        assert found[family] == f"{reason} so far; use it or choose another model"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.architecture)
@pytest.mark.filterwarnings("ignore")  # importing transformers
def test_a_row_tells_the_truth(row: Row) -> None:
    """The small models have the row's architecture, its test files exist, and text models are multimodal."""
    for family in row.families:
        config = SMALL[family]()
        names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if hasattr(config, "vision_config"):
            names = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        assert names[config.model_type] == row.architecture
    for path in row.shown_by:
        assert (ROOT / path).is_file()
    multimodal = bool(set(row.families) & set(families.MULTIMODAL))
    assert multimodal == (row.architecture in TEXT_MODELS)


def test_features_are_shown_by_their_tests() -> None:
    """A row's ranks, LoRA and quantized weights have a test file that names its small model."""
    files = {"ranks": "ranks", "LoRA": "lora", "4 and 8 bits": "test_quantized", "8 bits": "test_quantized"}
    for row in ROWS:
        for feature in row.features:
            shown = [(ROOT / path).read_text() for path in row.shown_by if files[feature] in path]
            assert any(f'"{family}"' in text for family in row.families for text in shown), (row, feature)


def test_all_text_models_and_refusals_are_in_the_page() -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    for name in (*TEXT_MODELS, *families.REFUSED):
        assert f"`{name}`" in text
    assert (ROOT / REFUSALS).is_file()
    assert {row.architecture for row in ROWS} >= set(TEXT_MODELS)
