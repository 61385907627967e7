"""Our own CPU kernels, compared with plain PyTorch in float32, on odd shapes and in caches full of NaN."""

import itertools
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from protos.errors import ConfigurationRefused
from tests.support.attention import naive_attention
from tests.support.foreign import Foreign, foreign_folders
from worker_svc.devices.attention import AttentionCall, AttentionParams, PagedInput
from worker_svc.devices.cpu import device as device_module
from worker_svc.devices.cpu.device import CpuDevice
from worker_svc.devices.cpu.kernels import build, ops
from worker_svc.devices.cpu.kernels.program import Kernels, Program

BLOCK = 64


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def _close(got: torch.Tensor, expected: torch.Tensor, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Compares with a tolerance of one rounding to `dtype` of a float32 sum."""
    tolerance = torch.finfo(dtype).eps * (1 if dtype == torch.bfloat16 else 16)
    torch.testing.assert_close(
        got.float(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
    )


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("rows", [1, 2, 11, 12, 13, 24, 25, 37, 128])
@pytest.mark.parametrize(("columns", "size"), [(960, 576), (70, 64), (33, 1536), (1, 2), (2080, 18)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_with_packed_weights(
    kernels: Kernels, rows: int, columns: int, size: int, dtype: torch.dtype
) -> None:
    """A product with packed weights and a bias matches PyTorch, for any shape and result type."""
    x, weights, bias = _random(rows, size + 6)[:, :size], _random(columns, size), _random(columns)
    out = torch.full((rows, columns), torch.nan, dtype=dtype)
    kernels.linear(x, kernels.pack(weights), bias, out)()
    _close(out, x.float() @ weights.float().t() + bias.float(), dtype=torch.bfloat16 if dtype != torch.float32 else dtype)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_do_not_depend_on_their_neighbours(kernels: Kernels, dtype: torch.dtype) -> None:
    x, packed = torch.randn(128, 576).to(dtype), kernels.pack(torch.randn(960, 576).to(dtype))
    alone, together = torch.empty(1, 960, dtype=dtype), torch.empty(128, 960, dtype=dtype)
    kernels.linear(x, packed, None, together)()
    for row in (0, 11, 64, 127):
        kernels.linear(x[row : row + 1], packed, None, alone)()
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [64, 70, 576])
def test_norms(kernels: Kernels, size: int, weight_dtype: torch.dtype) -> None:
    weight = torch.randn(size).to(weight_dtype)

    def normalized(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()

    x = _random(19, 3, size)[:, 1:]
    out = torch.empty(x.shape).bfloat16()
    kernels.norm(x, weight, 1e-5, out)()
    _close(out, normalized(x))
    x, residual = _random(19, size), _random(19, size)
    total = x + residual
    kernels.add_norm(x, residual, weight, 1e-5)()
    assert torch.equal(residual, total)
    _close(x, normalized(total))


@pytest.mark.parametrize("size", [8, 100, 1536])
def test_gates(kernels: Kernels, size: int) -> None:
    x = torch.cat([_random(9, size) * 20, _random(9, size)], dim=1)
    out = torch.empty(9, size).bfloat16()
    for how, function in (
        ("silu", functional.silu),
        ("gelu_tanh", lambda gate: functional.gelu(gate, approximate="tanh")),
    ):
        kernels.gate(x, how, out)()
        _close(out, function(x[:, :size].float()) * x[:, size:].float())


@pytest.mark.parametrize(("head", "rotated"), [(64, 64), (96, 24), (256, 256)])
def test_rotary_positions(kernels: Kernels, head: int, rotated: int) -> None:
    tokens, heads, kv_heads, half = 11, 3, 1, rotated // 2
    turns, positions = _random(50, rotated), torch.randint(0, 50, (tokens,))
    both = _random(tokens, (heads + kv_heads) * head)
    query, key = both[:, : heads * head], both[:, heads * head :]
    expected = both.float().view(tokens, heads + kv_heads, head).clone()
    cosine, sine = (part[:, None] for part in turns[positions].float().chunk(2, dim=1))
    left, right = expected[..., :half].clone(), expected[..., half:rotated].clone()
    expected[..., :half] = left * cosine - right * sine
    expected[..., half:rotated] = right * cosine + left * sine
    kernels.rotate(positions, query, key, head, turns)()
    _close(both.view(expected.shape), expected)


class _Sequences:
    """Queries, keys and values of some sequences, and a cache that holds NaN wherever nothing was written."""

    def __init__(self, params: AttentionParams, lengths: Sequence[int]) -> None:
        self.params = params
        self.keys = [_random(length, params.num_kv_heads, params.head_size) for length in lengths]
        self.values = [torch.randn_like(keys) for keys in self.keys]
        self.queries = [_random(length, params.num_heads, params.head_size) for length in lengths]
        counts = [-(-length // BLOCK) for length in lengths]
        ids = iter(torch.randperm(sum(counts)).add(1).tolist())
        self.tables = torch.zeros((len(lengths), max(counts)), dtype=torch.int32)
        for row, count in enumerate(counts):
            self.tables[row, :count] = torch.tensor(list(itertools.islice(ids, count)))
        cache_shape = (sum(counts) + 1, params.num_kv_heads, 2 * BLOCK, params.head_size)
        self.cache = torch.full(cache_shape, torch.nan).bfloat16()
        self.sinks = torch.randn(params.num_heads) if params.sinks else None

    def step(self, kernels: Kernels, spans: Sequence[tuple[int, int, int]], padding: int = 0) -> torch.Tensor:
        """Runs (sequence, start, end) as one step, looks at its result and returns it without padding."""
        counts = [end - start for _, start, end in spans]
        total = sum(counts)

        def gathered(each: Sequence[torch.Tensor]) -> torch.Tensor:
            parts = [each[row][start:end] for row, start, end in spans]
            return torch.cat([*parts, torch.full((padding, *parts[0].shape[1:]), torch.nan).bfloat16()])

        slots = [
            int(self.tables[row, position // BLOCK]) * BLOCK + position % BLOCK
            for row, start, end in spans
            for position in range(start, end)
        ]
        step = PagedInput(
            seq_lens=torch.tensor([end for *_, end in spans], dtype=torch.int32),
            query_start=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
            block_table=self.tables[[row for row, *_ in spans]],
            slot_mapping=torch.tensor(slots + [0] * padding),
            num_tokens=total,
        )
        query = gathered(self.queries)
        out = torch.full_like(query, torch.nan)
        attend = kernels.attention(
            AttentionCall(
                self.params, query, gathered(self.keys), gathered(self.values), self.cache, out, self.sinks
            )
        )
        attend(kernels.plan(BLOCK, step))
        assert not out[total:].any()
        starts = itertools.accumulate(counts, initial=0)
        for (row, begin, end), at in zip(spans, starts, strict=False):
            mine = slice(at, at + end - begin)
            keys, values = self.keys[row][:end], self.values[row][:end]
            expected = naive_attention(self.params, query[mine].float(), keys, values, begin, self.sinks)
            torch.testing.assert_close(out[mine].float(), expected, rtol=0, atol=2e-2)
        return out[:total]


_KINDS = [
    (head, kv_heads, group, window, softcap, sinks)
    for (head, kv_heads, group), (window, softcap, sinks) in itertools.product(
        [(64, 3, 3), (256, 1, 4), (32, 2, 1), (128, 1, 16)],
        [(0, 0.0, False), (100, 0.0, False), (0, 20.0, True), (33, 5.0, True)],
    )
]


def _params(kind: tuple[int, int, int, int, float, bool]) -> AttentionParams:
    head, kv_heads, group, window, softcap, sinks = kind
    return AttentionParams(
        kv_heads * group, kv_heads, head, head**-0.5, window, softcap, writes=True, sinks=sinks
    )


@pytest.mark.parametrize("kind", _KINDS, ids=str)
def test_decoding_rows_of_all_lengths_attend(
    kernels: Kernels, kind: tuple[int, int, int, int, float, bool]
) -> None:
    lengths = [1, 2, 33, 64, 65, 512, 513, 700, 1300]
    sequences = _Sequences(_params(kind), lengths)
    for row, length in enumerate(lengths):
        if length > 1:
            sequences.step(kernels, [(row, 0, length - 1)], padding=0)
    sequences.step(kernels, [(row, length - 1, length) for row, length in enumerate(lengths)], padding=0)


@pytest.mark.parametrize("kind", _KINDS, ids=str)
def test_chunks_of_a_prompt_attend(kernels: Kernels, kind: tuple[int, int, int, int, float, bool]) -> None:
    sequences = _Sequences(_params(kind), [300])
    ends = [1, 8, 136, 137, 265, 300]
    for start, end in itertools.pairwise([0, *ends]):
        sequences.step(kernels, [(0, start, end)], padding=3)


@pytest.mark.parametrize("kind", _KINDS, ids=str)
def test_attention_does_not_depend_on_the_partition(
    kernels: Kernels, kind: tuple[int, int, int, int, float, bool]
) -> None:
    """A token has the same bits in chunks that begin anywhere, and in decode steps, alone or among others."""
    length, other = 1300, 600
    sequences = _Sequences(_params(kind), [length, other])
    sequences.step(kernels, [(1, 0, other - 1)])
    whole = torch.cat([
        sequences.step(kernels, [(0, start, min(start + 512, length))]) for start in range(0, length, 512)
    ])  # fmt: skip
    for ends in ([1, 2, 33, 34, 515, 516, 1024, 1290], [127, 385, 386, 513, 1025, 1285]):
        pieces = [
            sequences.step(kernels, [(0, start, end)], padding=end % 3)
            for start, end in itertools.pairwise([0, *ends])
        ]
        for token in range(ends[-1], length):
            both = [(0, token, token + 1), (1, other - 1, other)][: 1 + token % 2]
            pieces.append(sequences.step(kernels, both)[:1])
        assert torch.equal(torch.cat(pieces), whole)


def test_a_layer_that_reads_anothers_cache_does_not_write(kernels: Kernels) -> None:
    params = AttentionParams(2, 1, 64, 0.125, 0, 0.0, writes=False)
    cache = _random(2, 1, 2 * BLOCK, 64)
    before = cache.clone()
    one = torch.tensor([1], dtype=torch.int32)
    step = PagedInput(one, torch.tensor([0, 1], dtype=torch.int32), one[None], torch.tensor([BLOCK]), 1)
    out = torch.empty(1, 2, 64).bfloat16()
    kernels.attention(AttentionCall(params, _random(1, 2, 64), None, None, cache, out, None))(
        kernels.plan(BLOCK, step)
    )
    assert torch.equal(cache, before)
    # Only one token is visible, so its values are the result.
    assert torch.equal(out[0, 0], cache[1, 0, BLOCK:].reshape(BLOCK // 2, 64, 2)[0, :, 0])


def test_joined_programs_run_in_order(kernels: Kernels) -> None:
    x, first, second = _random(5, 64), _random(64, 64) / 8, _random(64, 64) / 8
    middle, out = torch.empty(5, 64).bfloat16(), torch.empty(5, 64).bfloat16()
    one, two = kernels.linear(x, kernels.pack(first), None, middle), kernels.linear(middle, kernels.pack(second), None, out)  # fmt: skip
    one()
    two()
    apart = out.clone()
    out.zero_()
    joined = Program.join([one, two])
    for _ in range(200):
        out.zero_()
        joined()
        assert torch.equal(out, apart)


def test_adapters_run_beside_their_layers_product(kernels: Kernels) -> None:
    x, inputs, base, after, shrunk = (torch.zeros(9, 64).bfloat16() for _ in range(5))
    x.copy_(_random(9, 64))
    weights = [kernels.pack(_random(64, 64) / 8) for _ in range(3)]
    a = torch.stack([kernels.pack(_random(64, 64) / 8) for _ in range(2)])
    b = torch.stack([kernels.pack(_random(64, 64) / 8) for _ in range(2)])
    slots = torch.tensor([0, 0, 1, -1, 1, 0, 0, 0, 1], dtype=torch.int32)
    programs = [
        kernels.linear(x, weights[0], None, inputs), kernels.linear(inputs, weights[1], None, base),
        kernels.shrink(inputs, a, slots, shrunk), kernels.expand(base, shrunk, b, slots, (64,)),
        kernels.linear(base, weights[2], None, after),
    ]  # fmt: skip
    for program in programs:
        program()
    apart = after.clone()
    joined = Program.join(programs)
    assert [op.beside for op in joined._ops] == [0, 1, 0, 0, 0]
    for _ in range(200):
        for tensor in (inputs, base, shrunk, after):
            tensor.fill_(torch.nan)
        joined()
        assert torch.equal(after, apart)


def test_the_number_of_threads_changes_no_bit(kernels: Kernels) -> None:
    x, weights = _random(40, 576), kernels.pack(_random(960, 576))
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out = torch.empty(40, 960).bfloat16()
            kernels.linear(x, weights, None, out)()
            results.append(out)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_device_fuses_consecutive_own_kernels() -> None:
    device = CpuDevice()
    try:
        kernels = Kernels(build.library())
    except build.KernelsUnavailable as error:
        pytest.skip(f"the kernels are unavailable: {error}")
    x = _random(2, 64)
    gate = kernels.gate(x, "silu", torch.empty(2, 32).bfloat16())
    ran: list[int] = []
    fused = device.fuse([gate, gate, lambda: ran.append(1), gate], [0, 0, 0, 0])
    assert [isinstance(run, Program) for run, _ in fused] == [True, False, True]
    for run, _ in fused:
        run()
    assert ran == [1]


def test_several_processes_may_compile_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nsleep 0.1\necho made > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    folder = tmp_path / "kernels"
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(build.compile_into(folder))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [folder / build.file_name()] * 4
    assert [path.name for path in folder.iterdir()] == [build.file_name()]
    assert paths[0].read_bytes().startswith(b"made\n")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a machine whose processor can run the kernels, and whose compiler writes a text."""
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho made > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_processor_flags", lambda: frozenset(build._NEEDED))
    return tmp_path / "cache" / "triptych" / "kernels"


def test_a_library_with_other_content_is_compiled_again(cache: Path) -> None:
    """Its name alone does not make it ours: the file ends with a digest of all before it."""
    made = build.library()
    assert made == cache / build.file_name()
    assert cache.stat().st_mode & 0o777 == 0o700
    content = made.read_bytes()
    for planted in (b"planted", b"", b"planted" + content[-32:], content[:-1]):
        made.write_bytes(planted)
        assert build.library() == made
        assert made.read_bytes() == content
    stamp = made.stat().st_mtime_ns
    assert build.library().stat().st_mtime_ns == stamp


@foreign_folders
def test_a_cache_that_others_can_write_to_is_refused(cache: Path, foreign: Foreign) -> None:
    """Nothing is loaded from there, not even what was compiled here."""
    build.library()
    words = foreign(cache)
    with pytest.raises(ConfigurationRefused, match=f"the cache of kernels {cache} belongs to {words}"):
        build.library()


@pytest.mark.parametrize(("compiler", "reason"), [("/bin/false", "does not compile"), ("/no/compiler", "cannot be compiled")])  # fmt: skip
def test_no_compiler_no_kernels(
    compiler: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(build.KernelsUnavailable, match=reason):
        build.compile_into(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_command_says_why_it_compiled_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "triptych", "build-kernels", str(tmp_path)],
        env={"CXX": "/bin/false", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("no kernels: /bin/false")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("missing", build._NEEDED)
def test_other_processors_get_the_wheels_kernels(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_processor_flags", lambda: frozenset(build._NEEDED) - {missing})
    with pytest.raises(build.KernelsUnavailable, match=f"the processor has no {missing}$"):
        build.library()


@pytest.mark.parametrize("amx", [False, True])
def test_matrix_units_take_attention_from_the_wheel(
    kernels: Kernels, amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With AMX, the wheel attends and multiplies in bfloat16; our kernels multiply in float32."""
    flags = {*build._NEEDED, *(["amx_bf16"] if amx else [])}
    monkeypatch.setattr(build, "_processor_flags", lambda: frozenset(flags))
    params = AttentionParams(2, 1, 64, 0.125, 0, 0.0, writes=True)
    own = device_module._kernels_for(2, 1, 64, torch.bfloat16, BLOCK)
    assert (own is None) == (ops.product_kernels(torch.bfloat16) is None) == amx
    assert ops.kernels() is ops.product_kernels(torch.float32) is not None
    query, key, out = _random(1, 2, 64), _random(1, 1, 64), torch.empty(1, 2, 64).bfloat16()
    call = AttentionCall(params, query, key, key, _random(2, 1, 2 * BLOCK, 64), out)
    assert isinstance(CpuDevice().bind_attention(call), Program) == (not amx)
