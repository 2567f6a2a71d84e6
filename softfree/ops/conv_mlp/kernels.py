# mypy: disable-error-code="assignment"
"""A depthwise 3 x 3 convolution of tokens with GELU after it, and the gradient of both.

A program takes ``COLUMNS`` adjacent columns of an image and some channels, and moves down the image's rows. A
thread has all these columns of its channels, so that each value it reads from a row serves up to three of its
results; a tuple has one tile of channels, (C,), for each column. Values outside of the image are 0.

The number of channels is a compile-time constant: the addresses of neighbouring columns then differ by a
constant, which takes neither instructions nor registers. While a row is processed, the next one is loading.
"""

import triton
import triton.language as tl

from softfree.ops.shared.kernels import gelu, gelu_and_slope


@triton.jit
def begin(CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr):
    """The number of this program among those with the same channels, its channels, and which of them exist.

    Programs that run side by side read channels that lie side by side.
    """
    tiles: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    channel = tl.program_id(0) % tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    if CHANNELS % BLOCK_C == 0:
        inside = tl.full((BLOCK_C,), True, tl.int1)  # which the compiler can leave out
    else:
        inside = channel < CHANNELS
    return tl.program_id(0) // tiles, channel, inside


@triton.jit
def load_filters(p_w, channel, inside, FLIP: tl.constexpr):
    """The nine weights of each channel, row by row, each (C,).

    ``FLIP`` rotates the filter by 180 degrees.
    """
    weights = ()
    for place in tl.static_range(9):
        p_tap = p_w + channel * 9 + (8 - place if FLIP else place)
        weights = weights + (tl.load(p_tap, mask=inside, other=0.0).to(tl.float32),)
    return weights


@triton.jit
def load_row(
    p_x, y, x, channel, inside, height, width,
    CHANNELS: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """Row y of an image at columns x - BEFORE, ..., x + AFTER, each (C,), not cast, 0 outside."""
    p_row = p_x + ((y * width).to(tl.int64) + x) * CHANNELS
    exists = (y >= 0) & (y < height)
    tiles = ()
    for place in tl.static_range(-BEFORE, AFTER + 1):
        mask = inside & (exists & (x + place >= 0) & (x + place < width))
        b_tile = tl.load(p_row + place * CHANNELS + channel, mask=mask, other=0.0)
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
def repeated(b_tile, COUNT: tl.constexpr):
    """A tuple of the same tile COUNT times."""
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = tiles + (b_tile,)
    return tiles


@triton.jit
def position(item, height, width, strips, tiles_x, rows, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """The position of an item, which is a strip of rows of some columns.

    Returns the offset of its image, its first row, the row after its last, and its first column.
    """
    image = (item // (strips * tiles_x)).to(tl.int64) * height * width * CHANNELS
    top = item // tiles_x % strips * rows
    return image, top, tl.minimum(top + rows, height), item % tiles_x * COLUMNS


@triton.jit
def conv_gelu_kernel(
    p_x, p_w, p_b, p_out, height, width, strips, tiles_x, rows,
    FAST: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid (images * strips * tiles_x * tiles of channels,).

    Writes ``gelu(conv(x) + b)`` of a strip of rows.
    """
    item, channel, inside = begin(CHANNELS, BLOCK_C)
    weights = load_filters(p_w, channel, inside, False)
    b_b = tl.load(p_b + channel, mask=inside, other=0.0).to(tl.float32)
    image, top, bottom, x = position(item, height, width, strips, tiles_x, rows, CHANNELS, COLUMNS)
    p_x += image
    p_out += image
    start = repeated(b_b, COLUMNS)
    row = load_row(p_x, top - 1, x, channel, inside, height, width, CHANNELS, 1, COLUMNS)
    here = add_row(start, weights, row, 0, COLUMNS)
    row = load_row(p_x, top, x, channel, inside, height, width, CHANNELS, 1, COLUMNS)
    here = add_row(here, weights, row, 3, COLUMNS)
    below = add_row(start, weights, row, 0, COLUMNS)
    row = load_row(p_x, top + 1, x, channel, inside, height, width, CHANNELS, 1, COLUMNS)
    for y in range(top, bottom):
        coming = load_row(p_x, y + 2, x, channel, inside, height, width, CHANNELS, 1, COLUMNS)
        here = add_row(here, weights, row, 6, COLUMNS)
        p_row = p_out + ((y * width).to(tl.int64) + x) * CHANNELS
        for column in tl.static_range(COLUMNS):
            b_out = gelu(here[column], FAST).to(p_out.dtype.element_ty)
            tl.store(p_row + column * CHANNELS + channel, b_out, mask=inside & (x + column < width))
        here = add_row(below, weights, row, 3, COLUMNS)
        below = add_row(start, weights, row, 0, COLUMNS)
        row = coming


@triton.jit
def conv_gelu_backward_kernel(
    p_g, p_x, p_w, p_b, p_dz, p_parts,
    height, width, strips, tiles_x, rows, items, stretches,
    FAST: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid (stretches * tiles of channels,). Writes dz for ``z = conv(x) + b``, and parts of b's gradient.

    p_g: the gradient of ``gelu(z)``; it is overwritten by ``gelu(z)``.
    p_parts: (stretches, channels).
    """
    stretch, channel, inside = begin(CHANNELS, BLOCK_C)
    weights = load_filters(p_w, channel, inside, False)
    b_b = tl.load(p_b + channel, mask=inside, other=0.0).to(tl.float32)
    b_sum = tl.zeros((BLOCK_C,), tl.float32)
    start = repeated(b_b, COLUMNS)
    for item in range(stretch, items, stretches):
        image, top, bottom, x = position(
            item, height, width, strips, tiles_x, rows, CHANNELS, COLUMNS
        )
        p_image = p_x + image
        p_grad = p_g + image
        row = load_row(p_image, top - 1, x, channel, inside, height, width, CHANNELS, 1, COLUMNS)
        here = add_row(start, weights, row, 0, COLUMNS)
        row = load_row(p_image, top, x, channel, inside, height, width, CHANNELS, 1, COLUMNS)
        here = add_row(here, weights, row, 3, COLUMNS)
        below = add_row(start, weights, row, 0, COLUMNS)
        row = load_row(p_image, top + 1, x, channel, inside, height, width, CHANNELS, 1, COLUMNS)
        g = load_row(p_grad, top, x, channel, inside, height, width, CHANNELS, 0, COLUMNS - 1)
        for y in range(top, bottom):
            coming = load_row(
                p_image, y + 2, x, channel, inside, height, width, CHANNELS, 1, COLUMNS
            )
            # Not beyond the strip: another program may have overwritten that row.
            g_coming = load_row(
                p_grad, y + 1, x, channel, inside, bottom, width, CHANNELS, 0, COLUMNS - 1
            )
            here = add_row(here, weights, row, 6, COLUMNS)
            place = ((y * width).to(tl.int64) + x) * CHANNELS
            p_row = p_dz + image + place
            p_act = p_grad + place
            for column in tl.static_range(COLUMNS):
                written = inside & (x + column < width)
                b_act, b_slope = gelu_and_slope(here[column], FAST)
                b_dz = b_slope * g[column].to(tl.float32)
                p_here = p_row + column * CHANNELS + channel
                tl.store(p_here, b_dz.to(p_dz.dtype.element_ty), mask=written)
                p_here = p_act + column * CHANNELS + channel
                tl.store(p_here, b_act.to(p_g.dtype.element_ty), mask=written)
                b_sum += b_dz
            here = add_row(below, weights, row, 3, COLUMNS)
            below = add_row(start, weights, row, 0, COLUMNS)
            row = coming
            g = g_coming
    tl.store(p_parts + stretch * CHANNELS + channel, b_sum, mask=inside)


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
    height, width, strips, tiles_x, rows, items, stretches,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid (stretches * tiles of channels,).

    Writes dx (dz convolved with rotated filters), and parts of sums.

    p_parts: (stretches, 10, channels), the gradient of the rotated filters, row by row, and the sum of dx.
    """
    stretch, channel, inside = begin(CHANNELS, BLOCK_C)
    weights = load_filters(p_w, channel, inside, True)
    b_sum = tl.zeros((BLOCK_C,), tl.float32)
    start = repeated(b_sum, COLUMNS)
    sums = repeated(b_sum, 9)
    for item in range(stretch, items, stretches):
        image, top, bottom, x = position(
            item, height, width, strips, tiles_x, rows, CHANNELS, COLUMNS
        )
        p_image = p_dz + image
        p_input = p_x + image
        row = load_row(p_image, top - 1, x, channel, inside, height, width, CHANNELS, 1, COLUMNS)
        x_here = load_row(p_input, top, x, channel, inside, height, width, CHANNELS, 0, COLUMNS - 1)
        here = add_row(start, weights, row, 0, COLUMNS)
        sums = add_products(sums, x_here, row, 0, COLUMNS)
        row = load_row(p_image, top, x, channel, inside, height, width, CHANNELS, 1, COLUMNS)
        here = add_row(here, weights, row, 3, COLUMNS)
        sums = add_products(sums, x_here, row, 3, COLUMNS)
        coming = load_row(p_image, top + 1, x, channel, inside, height, width, CHANNELS, 1, COLUMNS)
        # Rows of x from `bottom` on are another item's.
        x_below = load_row(
            p_input, top + 1, x, channel, inside, bottom, width, CHANNELS, 0, COLUMNS - 1
        )
        for y in range(top, bottom):
            # Row y of dx still lacks the row below it; row y + 1 still lacks its own row and the one below.
            below = add_row(start, weights, row, 0, COLUMNS)
            sums = add_products(sums, x_below, row, 0, COLUMNS)
            row = coming
            coming = load_row(
                p_image, y + 2, x, channel, inside, height, width, CHANNELS, 1, COLUMNS
            )
            x_coming = load_row(
                p_input, y + 2, x, channel, inside, bottom, width, CHANNELS, 0, COLUMNS - 1
            )
            here = add_row(here, weights, row, 6, COLUMNS)
            sums = add_products(sums, x_here, row, 6, COLUMNS)
            sums = add_products(sums, x_below, row, 3, COLUMNS)
            p_row = p_dx + image + ((y * width).to(tl.int64) + x) * CHANNELS
            for column in tl.static_range(COLUMNS):
                exists = x + column < width
                b_dx = tl.where(exists, here[column], 0.0)
                p_here = p_row + column * CHANNELS + channel
                tl.store(p_here, b_dx.to(p_dx.dtype.element_ty), mask=inside & exists)
                b_sum += b_dx
            here = add_row(below, weights, row, 3, COLUMNS)
            x_here = x_below
            x_below = x_coming
    p_parts += stretch * 10 * CHANNELS + channel
    for place in tl.static_range(9):
        tl.store(p_parts + place * CHANNELS, sums[place], mask=inside)
    tl.store(p_parts + 9 * CHANNELS, b_sum, mask=inside)
