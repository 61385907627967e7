"""The output file of a batch."""

from pathlib import Path

import pytest

from deploy.client.batch_file import BatchOutput, BatchRequest
from deploy.client.connection import ClientError


@pytest.mark.parametrize("content", ["notes without a line's end", '{"id": 1}', "first\nsecond"])
def test_another_file_is_left_alone(tmp_path: Path, content: str) -> None:
    """Only what begins like a line of a batch can be a line that was cut off."""
    path = tmp_path / "notes"
    path.write_text(content)
    with pytest.raises(ClientError, match="is not the output of a batch"):
        BatchOutput(path).open()
    assert path.read_text() == content


@pytest.mark.parametrize("kept", [1, 5, 40])
def test_a_line_that_was_cut_off_is_replaced(tmp_path: Path, kept: int) -> None:
    """Wherever it was cut; the lines before it stay."""
    path = tmp_path / "out.jsonl"
    output = BatchOutput(path)
    output.open()
    output.write_response(BatchRequest("a", "/score", {}), 200, "id", {"text": "ä\n"})
    output.close()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:kept])
    output = BatchOutput(path)
    output.open()
    output.close()
    assert path.read_bytes() == whole
    assert output.done_ids == {"a"}
