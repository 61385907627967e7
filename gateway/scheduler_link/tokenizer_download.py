"""Download of the served model's tokenizer files, which a scheduler streams in chunks."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc.aio

from protos.errors import Internal, from_rpc_error
from protos.triptych.v1 import inference_pb2 as inference

if TYPE_CHECKING:
    from protos.triptych.v1.inference_pb2_grpc import InferenceAsyncStub

# Today's largest tokenizers take 40 MB in a handful of files.
MAX_TOKENIZER_BYTES: Final = 256 * 2**20
MAX_TOKENIZER_FILES: Final = 64


async def download_tokenizer(stub: "InferenceAsyncStub", folder: Path, timeout_s: float) -> None:
    """Writes the model's tokenizer files into ``folder``.

    Args:
        stub: the scheduler.
        folder: an empty folder.
        timeout_s: for the whole download.

    Raises:
        Internal: if the stream cannot be a tokenizer: it has unsafe file names, too many files or too many
            bytes.
        TriptychError: if the scheduler is away or refuses.
    """
    names: set[str] = set()
    bytes_left = MAX_TOKENIZER_BYTES
    call = stub.GetTokenizer(inference.GetTokenizerRequest(), timeout=timeout_s)
    try:
        async for chunk in call:
            name = chunk.name
            if Path(name).name != name or name in {"", ".", ".."} or "\0" in name:
                raise Internal(f"the scheduler sent a tokenizer file with the name {name[:80]!r}")
            names.add(name)
            bytes_left -= len(chunk.data)
            if len(names) > MAX_TOKENIZER_FILES or bytes_left < 0:
                raise Internal(
                    f"the scheduler sent more than {MAX_TOKENIZER_FILES} tokenizer files or"
                    f" {MAX_TOKENIZER_BYTES >> 20} MiB of them; check that the model's folder holds no other"
                    " files"
                )
            # The folder is temporary: the write ends in the page cache and does not block for long.
            with (folder / name).open("ab") as file:
                file.write(chunk.data)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    finally:
        call.cancel()
