"""Tokenizer files of the first worker: reception, limits and hash."""

import pytest

from protos.errors import Internal
from protos.triptych.v1 import common_pb2, worker_pb2
from scheduler_svc.api.messages import files_to_proto
from scheduler_svc.workers import model_files
from scheduler_svc.workers.descriptions import description_from_proto
from scheduler_svc.workers.model_files import FileReceiver, describe_served


def receive(*chunks: common_pb2.FileChunk) -> dict[str, bytes]:
    receiver = FileReceiver()
    for chunk in chunks:
        receiver.add(chunk.name, chunk.data, last=chunk.last)
    return receiver.files()


def test_files_survive_being_cut_into_messages() -> None:
    """Empty files and files larger than one message arrive complete."""
    files = {"a.json": b"x" * 1_300_000, "empty": b""}
    chunks = list(files_to_proto(files))
    assert len(chunks) == 4
    assert receive(*chunks) == files


@pytest.mark.parametrize("name", ["", "../etc/passwd", "a/b", "a\\b", ".hidden", "a\0b"])
def test_a_file_name_that_is_more_than_a_name_is_refused(name: str) -> None:
    """A gateway uses the names as paths, so only plain file names are accepted."""
    with pytest.raises(Internal, match="only plain file names"):
        receive(common_pb2.FileChunk(name=name, last=True))


def test_a_stream_that_ends_within_a_file_is_refused() -> None:
    """An incomplete file is an error."""
    with pytest.raises(Internal, match=r"ended within a\.json"):
        receive(common_pb2.FileChunk(name="a.json", data=b"x"))


def test_too_many_or_too_large_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the number of files and their size are limited."""
    monkeypatch.setattr(model_files, "MAX_TOTAL_BYTES", 10)
    with pytest.raises(Internal, match="more than"):
        receive(common_pb2.FileChunk(name="a", data=b"x" * 11, last=True))
    with pytest.raises(Internal, match="more than 64 files"):
        receive(*(common_pb2.FileChunk(name=str(i), last=True) for i in range(65)))


def test_the_tokenizer_s_hash_depends_on_names_and_contents() -> None:
    """The hash does not depend on the order of files, so a gateway reloads only after a change."""
    model = description_from_proto(worker_pb2.DescribeResponse()).model

    def digest(files: dict[str, bytes]) -> str:
        return describe_served(model, files, served_names=(), max_model_len=8).info.tokenizer_sha256

    assert digest({"a": b"1", "b": b"2"}) == digest({"b": b"2", "a": b"1"})
    assert (
        len({digest({"a": b"1"}), digest({"a": b"2"}), digest({"b": b"1"}), digest({"a": b"", "1": b""})})
        == 4
    )
