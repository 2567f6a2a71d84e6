# mypy: disable-error-code="assignment"
"""A depthwise 3 x 3 convolution of tokens with GELU after it, and the gradient of both.

A program takes some columns of an image and some channels, and moves down the image's rows. A thread has
``COLUMNS`` adjacent columns, so that each value it reads from a row serves up to three of its results. Tiles
are (GROUPS, C): one for each of these columns and one for the neighbour on either side. Values outside of the
image are 0.
"""

import triton
import triton.language as tl

from softfree.ops.shared.kernels import gelu, gelu_and_slope


@triton.jit
def load_filters(p_w, channel, inside, FLIP: tl.constexpr):
    """The nine weights of each channel, row by row, each (1, C).

    ``FLIP`` rotates the filter by 180 degrees.
    """
    weights = ()
    for place in tl.static_range(9):
        p_tap = p_w + channel * 9 + (8 - place if FLIP else place)
        b_tap = tl.load(p_tap, mask=inside, other=0.0).to(tl.float32)
        weights = weights + (b_tap[None, :],)
    return weights


@triton.jit
def load_row(
    p_x, y, x, channel, inside, height, width, channels, BEFORE: tl.constexpr, AFTER: tl.constexpr
):
    """Row y of an image at columns x - BEFORE, ..., x + AFTER, each (GROUPS, C), not cast, 0 outside."""
    p_row = p_x + ((y * width).to(tl.int64) + x[:, None]) * channels + channel[None, :]
    exists = (y >= 0) & (y < height) & inside[None, :]
    tiles = ()
    for place in tl.static_range(-BEFORE, AFTER + 1):
        mask = ((x + place >= 0) & (x + place < width))[:, None] & exists
        b_tile = tl.load(p_row + place * channels, mask=mask, other=0.0)
        tiles = tiles + (b_tile,)
    return tiles


@triton.jit
def add_row(sums, weights, row, FIRST: tl.constexpr, COLUMNS: tl.constexpr):
    """Add a row's contribution to the convolution at COLUMNS columns, with three weights from FIRST on."""
    found = ()
    for column in tl.static_range(COLUMNS):
        b_sum = sums[column]
        for place in tl.static_range(3):
            b_sum += weights[FIRST + place] * row[column + place].to(tl.float32)
        found = found + (b_sum,)
    return found


@triton.jit
def each_column(b_tile, COLUMNS: tl.constexpr):
    """The same tile for each column."""
    tiles = ()
    for _ in tl.static_range(COLUMNS):
        tiles = tiles + (b_tile,)
    return tiles


@triton.jit
def position(item, height, width, channels, strips, tiles_x, rows,
             COLUMNS: tl.constexpr, GROUPS: tl.constexpr):  # fmt: skip
    """The position of an item, which is a strip of rows of some columns.

    Returns the offset of its image, its first row, the row after its last, and the first column of each
    group.
    """
    image = (item // (strips * tiles_x)).to(tl.int64) * height * width * channels
    top = item // tiles_x % strips * rows
    x = (item % tiles_x * GROUPS + tl.arange(0, GROUPS)) * COLUMNS
    return image, top, tl.minimum(top + rows, height), x


@triton.jit
def conv_gelu_kernel(
    p_x, p_w, p_b, p_out, height, width, channels, strips, tiles_x, rows,
    FAST: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid (images * strips * tiles_x, tiles of channels).

    Writes ``gelu(conv(x) + b)`` of a strip of rows.
    """
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    weights = load_filters(p_w, channel, inside, False)
    b_b = tl.load(p_b + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    image, top, bottom, x = position(
        tl.program_id(0), height, width, channels, strips, tiles_x, rows, COLUMNS, GROUPS
    )
    p_x += image
    start = each_column(tl.zeros((GROUPS, BLOCK_C), tl.float32) + b_b, COLUMNS)
    row = load_row(p_x, top - 1, x, channel, inside, height, width, channels, 1, COLUMNS)
    here = add_row(start, weights, row, 0, COLUMNS)
    row = load_row(p_x, top, x, channel, inside, height, width, channels, 1, COLUMNS)
    here = add_row(here, weights, row, 3, COLUMNS)
    below = add_row(start, weights, row, 0, COLUMNS)
    row = load_row(p_x, top + 1, x, channel, inside, height, width, channels, 1, COLUMNS)
    for y in range(top, bottom):
        # While this row is loading, the one before it is processed.
        coming = load_row(p_x, y + 2, x, channel, inside, height, width, channels, 1, COLUMNS)
        here = add_row(here, weights, row, 6, COLUMNS)
        places = image + ((y * width).to(tl.int64) + x[:, None]) * channels + channel[None, :]
        for column in tl.static_range(COLUMNS):
            b_out = gelu(here[column], FAST).to(p_out.dtype.element_ty)
            written = (x + column < width)[:, None] & inside[None, :]
            tl.store(p_out + places + column * channels, b_out, mask=written)
        here = add_row(below, weights, row, 3, COLUMNS)
        below = add_row(start, weights, row, 0, COLUMNS)
        row = coming


@triton.jit
def conv_gelu_backward_kernel(
    p_g, p_x, p_w, p_b, p_dz, p_parts,
    height, width, channels, strips, tiles_x, rows, items, stretches,
    COLUMNS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid (stretches, tiles of channels). Writes dz for ``z = conv(x) + b``, and parts of b's gradient.

    p_g: the gradient of ``gelu(z)``; it is overwritten by ``gelu(z)``.
    p_parts: (stretches, channels).
    """
    stretch = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    weights = load_filters(p_w, channel, inside, False)
    b_b = tl.load(p_b + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    b_sum = tl.zeros((GROUPS, BLOCK_C), tl.float32)
    start = each_column(b_sum + b_b, COLUMNS)
    for item in range(stretch, items, stretches):
        image, top, bottom, x = position(
            item, height, width, channels, strips, tiles_x, rows, COLUMNS, GROUPS
        )
        p_image = p_x + image
        row = load_row(p_image, top - 1, x, channel, inside, height, width, channels, 1, COLUMNS)
        here = add_row(start, weights, row, 0, COLUMNS)
        row = load_row(p_image, top, x, channel, inside, height, width, channels, 1, COLUMNS)
        here = add_row(here, weights, row, 3, COLUMNS)
        below = add_row(start, weights, row, 0, COLUMNS)
        row = load_row(p_image, top + 1, x, channel, inside, height, width, channels, 1, COLUMNS)
        for y in range(top, bottom):
            coming = load_row(
                p_image, y + 2, x, channel, inside, height, width, channels, 1, COLUMNS
            )
            g = load_row(
                p_g + image, y, x, channel, inside, height, width, channels, 0, COLUMNS - 1
            )
            here = add_row(here, weights, row, 6, COLUMNS)
            places = image + ((y * width).to(tl.int64) + x[:, None]) * channels + channel[None, :]
            for column in tl.static_range(COLUMNS):
                written = (x + column < width)[:, None] & inside[None, :]
                p_here = places + column * channels
                b_act, b_slope = gelu_and_slope(here[column])
                b_dz = b_slope * g[column].to(tl.float32)
                tl.store(p_dz + p_here, b_dz.to(p_dz.dtype.element_ty), mask=written)
                tl.store(p_g + p_here, b_act.to(p_g.dtype.element_ty), mask=written)
                b_sum += b_dz
            here = add_row(below, weights, row, 3, COLUMNS)
            below = add_row(start, weights, row, 0, COLUMNS)
            row = coming
    tl.store(p_parts + stretch * channels + channel, tl.sum(b_sum, 0), mask=inside)


@triton.jit
def add_products(sums, x, row, FIRST: tl.constexpr, COLUMNS: tl.constexpr):
    """Nine sums for the nine weights.

    To the three from FIRST on, products of x and ``row`` with its neighbours are added.
    """
    found = ()
    for place in tl.static_range(9):
        b_sum = sums[place]
        if (place >= FIRST) and (place < FIRST + 3):
            for column in tl.static_range(COLUMNS):
                b_sum += x[column].to(tl.float32) * row[column + place - FIRST].to(tl.float32)
        found = found + (b_sum,)
    return found


@triton.jit
def conv_backward_kernel(
    p_dz, p_x, p_w, p_dx, p_parts,
    height, width, channels, strips, tiles_x, rows, items, stretches,
    COLUMNS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid (stretches, tiles of channels). Writes dx (dz convolved with rotated filters), and parts of sums.

    p_parts: (stretches, 10, channels), the gradient of the rotated filters, row by row, and the sum of dx.
    """
    stretch = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    weights = load_filters(p_w, channel, inside, True)
    b_sum = tl.zeros((GROUPS, BLOCK_C), tl.float32)
    start = each_column(b_sum, COLUMNS)
    sums = each_column(b_sum, 9)
    for item in range(stretch, items, stretches):
        image, top, bottom, x = position(
            item, height, width, channels, strips, tiles_x, rows, COLUMNS, GROUPS
        )
        p_image = p_dz + image
        row = load_row(p_image, top - 1, x, channel, inside, height, width, channels, 1, COLUMNS)
        x_here = load_row(
            p_x + image, top, x, channel, inside, height, width, channels, 0, COLUMNS - 1
        )
        here = add_row(start, weights, row, 0, COLUMNS)
        sums = add_products(sums, x_here, row, 0, COLUMNS)
        row = load_row(p_image, top, x, channel, inside, height, width, channels, 1, COLUMNS)
        here = add_row(here, weights, row, 3, COLUMNS)
        sums = add_products(sums, x_here, row, 3, COLUMNS)
        for y in range(top, bottom):
            # Row y of dx still lacks the row below it; row y + 1 still lacks its own row and the one below.
            below = add_row(start, weights, row, 0, COLUMNS)
            within = tl.where(y + 1 < bottom, height, 0)  # else it is another item's row
            x_below = load_row(
                p_x + image, y + 1, x, channel, inside, within, width, channels, 0, COLUMNS - 1
            )
            sums = add_products(sums, x_below, row, 0, COLUMNS)
            row = load_row(p_image, y + 1, x, channel, inside, height, width, channels, 1, COLUMNS)
            here = add_row(here, weights, row, 6, COLUMNS)
            sums = add_products(sums, x_here, row, 6, COLUMNS)
            sums = add_products(sums, x_below, row, 3, COLUMNS)
            places = image + ((y * width).to(tl.int64) + x[:, None]) * channels + channel[None, :]
            for column in tl.static_range(COLUMNS):
                written = (x + column < width)[:, None] & inside[None, :]
                b_dx = tl.where(written, here[column], 0.0)
                tl.store(
                    p_dx + places + column * channels, b_dx.to(p_dx.dtype.element_ty), mask=written
                )
                b_sum += b_dx
            here = add_row(below, weights, row, 3, COLUMNS)
            x_here = x_below
    p_parts += stretch * 10 * channels + channel
    for place in tl.static_range(9):
        tl.store(p_parts + place * channels, tl.sum(sums[place], 0), mask=inside)
    tl.store(p_parts + 9 * channels, tl.sum(b_sum, 0), mask=inside)
