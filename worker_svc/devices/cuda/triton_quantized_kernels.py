"""Products with quantized weights on GPUs: the Triton kernels, which `triton_quantized` launches.

Weights are 32-bit words [outputs, words]. A tile is 16 words: place i of word w holds input `16 * i + w` of
the tile. So one place of a tile's words is 16 consecutive inputs, which share a scale.
"""

import triton
import triton.language as tl


@triton.jit
def few_rows_kernel(
    x, words, scales, bias, out, inputs, outputs, num_words, groups, x_row,
    ROWS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Multiplies ROWS rows by N outputs' weights, W words at a time. Grid: outputs / N.

    GROUP is 0 for one scale per output.
    """
    PLACES: tl.constexpr = 32 // BITS  # noqa: N806 - a constant
    output = tl.program_id(0) * N + tl.arange(0, N)
    there = output < outputs
    lane = tl.arange(0, W)
    sums = tl.zeros([ROWS, N, W], tl.float32)
    row = tl.arange(0, ROWS)
    for start in range(0, num_words, W):
        word = start + lane
        mask = there[:, None] & (word < num_words)[None, :]
        packed = tl.load(words + output.to(tl.int64)[:, None] * num_words + word[None, :], mask=mask, other=0)
        part = tl.zeros([ROWS, N, W], tl.float32)
        for place in tl.static_range(PLACES):
            code = ((packed >> (place * BITS)) & ((1 << BITS) - 1)) - (1 << (BITS - 1))
            source = word // 16 * (16 * PLACES) + place * 16 + word % 16
            values = tl.load(
                x + row[:, None] * x_row + source[None, :], mask=(source < inputs)[None, :], other=0.0
            )
            part += values.to(tl.float32)[:, None, :] * code.to(tl.float32)[None, :, :]
            if GROUP:  # noqa: SIM102 - both are constants, but the second divides by the first
                # The next place begins another group, or another tile.
                if (place + 1) % (GROUP // 16) == 0 or place + 1 == PLACES:
                    scale = tl.load(
                        scales + output[:, None] * groups + (source // GROUP)[None, :],
                        mask=mask & (source < inputs)[None, :], other=0.0,
                    )  # fmt: skip
                    sums += part * scale.to(tl.float32)[None, :, :]
                    part = tl.zeros([ROWS, N, W], tl.float32)
        if not GROUP:
            sums += part
    result = tl.sum(sums, 2)
    if not GROUP:
        result = result * tl.load(scales + output, mask=there, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        result += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)[None, :]
    target = out + row[:, None].to(tl.int64) * outputs + output[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=there[None, :])


@triton.jit
def many_rows_kernel(
    x, words, scales, bias, out, rows, inputs, outputs, num_words, groups, x_row,
    BITS: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Multiplies up to M rows by N outputs' weights, a tile of words at a time. Grid: outputs / N."""
    PLACES: tl.constexpr = 32 // BITS  # noqa: N806 - a constant
    output = tl.program_id(0) * N + tl.arange(0, N)
    there = output < outputs
    lane = tl.arange(0, 16)
    row = tl.arange(0, M)
    sums = tl.zeros([M, N], tl.float32)
    for start in range(0, num_words, 16):
        packed = tl.load(
            words + output.to(tl.int64)[None, :] * num_words + (start + lane)[:, None],
            mask=there[None, :],
            other=0,
        )
        part = tl.zeros([M, N], tl.float32)
        for place in tl.static_range(PLACES):
            code = ((packed >> (place * BITS)) & ((1 << BITS) - 1)) - (1 << (BITS - 1))
            source = start * PLACES + place * 16 + lane
            values = tl.load(
                x + row[:, None] * x_row + source[None, :],
                mask=(row < rows)[:, None] & (source < inputs)[None, :], other=0.0,
            )  # fmt: skip
            part = tl.dot(values, code.to(values.dtype), part, input_precision="ieee")
            if GROUP:  # noqa: SIM102 - as above
                if (place + 1) % (GROUP // 16) == 0 or place + 1 == PLACES:
                    group = (start * PLACES + place * 16) // GROUP
                    scale = tl.load(
                        scales + output * groups + group, mask=there & (group < groups), other=0.0
                    )
                    sums += part * scale.to(tl.float32)[None, :]
                    part = tl.zeros([M, N], tl.float32)
        if not GROUP:
            sums += part
    if not GROUP:
        sums = sums * tl.load(scales + output, mask=there, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        sums += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)[None, :]
    target = out + row[:, None].to(tl.int64) * outputs + output[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=(row < rows)[:, None] & there[None, :])


@triton.jit
def dequantize_kernel(
    words, scales, out, inputs, outputs, num_words, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Writes weights [outputs, inputs]. Grid: outputs / N, words / W."""
    PLACES: tl.constexpr = 32 // BITS  # noqa: N806 - a constant
    output = tl.program_id(0) * N + tl.arange(0, N)
    word = tl.program_id(1) * W + tl.arange(0, W)
    there = (output < outputs)[:, None] & (word < num_words)[None, :]
    packed = tl.load(words + output.to(tl.int64)[:, None] * num_words + word[None, :], mask=there, other=0)
    for place in tl.static_range(PLACES):
        code = ((packed >> (place * BITS)) & ((1 << BITS) - 1)) - (1 << (BITS - 1))
        source = word // 16 * (16 * PLACES) + place * 16 + word % 16
        mask = there & (source < inputs)[None, :]
        group = source // GROUP if GROUP else source * 0
        scale = tl.load(scales + output[:, None] * groups + group[None, :], mask=mask, other=0.0)
        weight = code.to(tl.float32) * scale.to(tl.float32)
        target = out + output.to(tl.int64)[:, None] * inputs + source[None, :]
        tl.store(target, weight.to(out.dtype.element_ty), mask=mask)
