"""A cache of models, and conversions of GGUF files in the test's process."""

from pathlib import Path

import pytest

from protos.errors import ConfigurationRefused
from worker_svc.model_files import gguf_convert, loader


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache."""
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Converts in the test's process, because another one imports torch for seconds."""

    def convert(source: Path, folder: Path) -> None:
        folder.mkdir()
        try:
            gguf_convert.convert(source, folder)
        except ValueError as error:
            raise ConfigurationRefused(f"cannot convert {source}: {error}") from error

    monkeypatch.setattr(loader, "_convert", convert)
