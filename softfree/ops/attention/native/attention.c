/* Softmax-free attention on a CPU. Compiled on first use, for the local processor.

   Per head, with tokens x (queries or keys), landmarks l and the mean landmark c, the kernel of a tile of
   tokens is

       P[j][t] = 2^(side_j . (x_t - c, ||x_t - c||^2, 1)),   side_j = s (l_j - c, -1/2, -||l_j - c||^2 / 2)

   with s = scale log2 e: landmarks are rows, tokens are columns. Whatever is as large as the tokens is
   computed in float32, with every product by multiply() on tiles whose rows are padded to PAD floats.
   Whatever is as large as the landmarks is computed in float64.

   Sums over tokens are computed over spans and then added in order. The length of a span depends only on
   the number of tokens, so results depend neither on the number of threads nor on the rest of the batch. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
#define LANES (BYTES / 4)
#define PAD 16  /* at least LANES */
#define TILE 64 /* tokens */
#define ROWS 6  /* rows of a block whose sums stay in registers, two vectors each */
#define LOG2_E 1.4426950408889634
#define FARTHEST 1e17f
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef int64_t size;

/* (batch, heads, count, channels) with contiguous channels. */
typedef struct {
    float *data;
    size by_batch, by_head, by_token;
} Tokens;

/* Queries or keys, and landmarks. */
typedef struct {
    size batch, heads, count, channels, landmarks, threads;
    Tokens tokens;
    const float *centre, *side; /* (batch * heads, channels), (batch * heads, landmarks, channels + 2) */
    float *kernels;             /* (batch * heads, tiles, landmarks, TILE), kept between passes; or NULL */
    size known;                 /* whether a pass has filled the kernels */
} Points;

INLINE size padded(size length) { return (length + PAD - 1) / PAD * PAD; }
INLINE size tiles_of(size length, size tile) { return (length + tile - 1) / tile; }
INLINE size smaller(size a, size b) { return a < b ? a : b; }
INLINE vec splat(float x) { return x - (vec){0}; }

/* 2^x for x up to slightly above 0; the result is 0 for x < -126. */
INLINE vec power_of_two(vec x) {
    ivec tiny = x < splat(-126.0f);
    vec magic = splat(12582912.0f), shifted = x + magic, r = x - (shifted - magic); /* |r| <= 1/2 */
    vec y = splat(1.535336188319500e-4f);
    y = y * r + 1.339887440266574e-3f;
    y = y * r + 9.618437357674640e-3f;
    y = y * r + 5.550332471162809e-2f;
    y = y * r + 2.402264791363012e-1f;
    y = y * r + 6.931472028550421e-1f;
    y = y * r + 1.0f;
    uvec power = ((uvec)shifted - (uvec)magic + 127) << 23; /* wraps where tiny */
    return (vec)((ivec)(y * (vec)power) & ~tiny);
}

/* A few rows and one or two vectors of columns of C = A B, or of C + A B. A[i][k] is a[i * ai + k * ak]. */
INLINE void block(size rows, size vectors, size depth, const float *a, size ai, size ak, const float *b, size bk,
                  float *c, size ci, int add) {
    vec sum[ROWS][2];
    for (size i = 0; i < rows; i++)
        for (size v = 0; v < vectors; v++) sum[i][v] = add ? *(const vec *)(c + i * ci + v * LANES) : (vec){0};
    for (size k = 0; k < depth; k++)
        for (size i = 0; i < rows; i++)
            for (size v = 0; v < vectors; v++)
                sum[i][v] += a[i * ai + k * ak] * *(const vec *)(b + k * bk + v * LANES);
    for (size i = 0; i < rows; i++)
        for (size v = 0; v < vectors; v++) *(vec *)(c + i * ci + v * LANES) = sum[i][v];
}

INLINE void strip(size vectors, size rows, size depth, const float *a, size ai, size ak, const float *b, size bk,
                  float *c, size ci, int add) {
    for (; rows >= ROWS; rows -= ROWS, a += ROWS * ai, c += ROWS * ci)
        block(ROWS, vectors, depth, a, ai, ak, b, bk, c, ci, add);
    switch (rows) { /* so that each count is a constant for the compiler */
    case 1: block(1, vectors, depth, a, ai, ak, b, bk, c, ci, add); break;
    case 2: block(2, vectors, depth, a, ai, ak, b, bk, c, ci, add); break;
    case 3: block(3, vectors, depth, a, ai, ak, b, bk, c, ci, add); break;
    case 4: block(4, vectors, depth, a, ai, ak, b, bk, c, ci, add); break;
    case 5: block(5, vectors, depth, a, ai, ak, b, bk, c, ci, add); break;
    }
}

/* C (rows x columns, a multiple of PAD) = A (rows x depth) B (depth x columns), or C + A B. */
static void multiply(size rows, size columns, size depth, const float *a, size ai, size ak, const float *b, size bk,
                     float *c, size ci, int add) {
    size j = 0;
    for (; j + 2 * LANES <= columns; j += 2 * LANES) strip(2, rows, depth, a, ai, ak, b + j, bk, c + j, ci, add);
    if (j < columns) strip(1, rows, depth, a, ai, ak, b + j, bk, c + j, ci, add);
}

/* Load tokens [begin, end) of a head, minus a centre, as TILE rows of `width`; 0 in the padding and where
   masked. */
static void load(const Tokens *tokens, size batch, size head, size begin, size end, size channels, size width,
                 const float *centre, const uint8_t *mask, float *rows) {
    const float *from = tokens->data + batch * tokens->by_batch + head * tokens->by_head;
    if (mask || end - begin < TILE || channels < width) memset(rows, 0, sizeof(float) * TILE * width);
    for (size t = begin; t < end; t++) {
        if (mask && !mask[t]) continue;
        const float *token = from + t * tokens->by_token;
        float *row = rows + (t - begin) * width;
        if (centre)
            for (size c = 0; c < channels; c++) {
                float x = token[c] - centre[c]; /* beyond FARTHEST the kernel is 0, and the square would overflow */
                row[c] = x > FARTHEST ? FARTHEST : x < -FARTHEST ? -FARTHEST : x;
            }
        else
            memcpy(row, token, sizeof(float) * channels);
    }
}

static void store(const float *rows, size width, const Tokens *tokens, size batch, size head, size begin, size end,
                  size channels) {
    float *to = tokens->data + batch * tokens->by_batch + head * tokens->by_head;
    for (size t = begin; t < end; t++)
        memcpy(to + t * tokens->by_token, rows + (t - begin) * width, sizeof(float) * channels);
}

typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));
#ifdef __clang__
#define SHUFFLE(x, y, i, j, k, l) __builtin_shufflevector(x, y, i, j, k, l)
#else
#define SHUFFLE(x, y, i, j, k, l) __builtin_shuffle(x, y, (int32_t __attribute__((vector_size(16)))){i, j, k, l})
#endif

/* Transpose rows (TILE, width) to columns (width, TILE), in 4 x 4 blocks. */
static void transpose(const float *rows, size width, float *columns) {
    for (size c = 0; c < width; c += 4)
        for (size t = 0; t < TILE; t += 4) {
            const float *from = rows + t * width + c;
            float *to = columns + c * TILE + t;
            quad a = *(const quad *)from, b = *(const quad *)(from + width);
            quad d = *(const quad *)(from + 2 * width), e = *(const quad *)(from + 3 * width);
            quad ab = SHUFFLE(a, b, 0, 4, 1, 5), de = SHUFFLE(d, e, 0, 4, 1, 5);
            *(quad *)to = SHUFFLE(ab, de, 0, 1, 4, 5);
            *(quad *)(to + TILE) = SHUFFLE(ab, de, 2, 3, 6, 7);
            ab = SHUFFLE(a, b, 2, 6, 3, 7), de = SHUFFLE(d, e, 2, 6, 3, 7);
            *(quad *)(to + 2 * TILE) = SHUFFLE(ab, de, 0, 1, 4, 5);
            *(quad *)(to + 3 * TILE) = SHUFFLE(ab, de, 2, 3, 6, 7);
        }
}

/* The scratch memory of a thread: a tile of tokens as rows and as columns, its kernel, and extra space. */
typedef struct {
    float *memory, *rows, *columns, *kernels, *more;
} Scratch;

static int reserve(Scratch *s, const Points *p, size more) {
    size own = padded(p->channels);
    s->memory = aligned_alloc(64, sizeof(float) * TILE * (2 * own + p->landmarks + more));
    s->rows = s->memory;
    s->columns = s->rows + TILE * own;
    s->kernels = s->columns + TILE * own;
    s->more = s->kernels + TILE * p->landmarks;
    return !s->memory;
}

/* P of a tile, (landmarks, TILE). Also loads its centred tokens into `rows` and, if P was not known,
   `columns`. */
static const float *kernel(const Points *p, Scratch *s, size row, size begin, size end, const uint8_t *mask) {
    size batch = row / p->heads, head = row % p->heads, own = padded(p->channels);
    float *values = s->kernels;
    load(&p->tokens, batch, head, begin, end, p->channels, own, p->centre + row * p->channels, mask, s->rows);
    if (p->kernels) {
        values = p->kernels + (row * tiles_of(p->count, TILE) + begin / TILE) * p->landmarks * TILE;
        if (p->known) return values;
    }
    float norms[TILE] = {0};
    transpose(s->rows, own, s->columns);
    for (size c = 0; c < p->channels; c++)
        for (size t = 0; t < TILE; t++) norms[t] += s->columns[c * TILE + t] * s->columns[c * TILE + t];
    size width = p->channels + 2;
    const float *side = p->side + row * p->landmarks * width;
    multiply(p->landmarks, TILE, p->channels, side, width, 1, s->columns, TILE, values, TILE, 0);
    for (size j = 0; j < p->landmarks; j++)
        for (size t = 0; t < TILE; t += LANES) {
            const float *rest = side + j * width + p->channels;
            vec *value = (vec *)(values + j * TILE + t);
            *value = power_of_two(*value + (rest[0] * *(const vec *)(norms + t) + rest[1]));
        }
    return values;
}

/* The number of tokens in a span, over which sums are computed at a time. */
static size span_of(size count) { return TILE * tiles_of(count / 64 > 512 ? count / 64 : 512, TILE); }

size softfree_spans(size count) { return tiles_of(count, span_of(count)); }

/* Add parts (heads, spans, length) in order to get sums (heads, length). With one span both are the same
   memory. */
static void add_parts(const float *parts, size heads, size spans, size length, float *sums, size threads) {
    if (parts == sums) return;
#pragma omp parallel for num_threads(threads)
    for (size row = 0; row < heads; row++) {
        memcpy(sums + row * length, parts + row * spans * length, sizeof(float) * length);
        for (size span = 1; span < spans; span++)
            for (size i = 0; i < length; i++) sums[row * length + i] += parts[(row * spans + span) * length + i];
    }
}

/* The functions below return 0, or -1 if memory is short. A mask is (batch, count), 0 where a key is
   absent; with NULL all take part. Matrices with a `width` have rows padded by zeros. `parts` is memory
   for the sums over spans, (batch * heads, spans, ...). */

/* sums (batch * heads, landmarks, width) = P V. */
int softfree_collect(const Points *p, const uint8_t *masks, const Tokens *values, size channels, float *parts,
                     float *sums) {
    size span = span_of(p->count), spans = tiles_of(p->count, span), heads = p->batch * p->heads;
    size width = padded(channels), length = p->landmarks * width;
    int failed = 0;
#pragma omp parallel num_threads(p->threads) reduction(| : failed)
    {
        Scratch s;
        failed |= reserve(&s, p, width);
#pragma omp for schedule(dynamic)
        for (size task = 0; task < heads * spans; task++) {
            size row = task / spans, begin = task % spans * span, end = smaller(begin + span, p->count);
            const uint8_t *mask = masks ? masks + row / p->heads * p->count : NULL;
            for (size t = begin; t < end && !failed; t += TILE) {
                size last = smaller(t + TILE, end);
                const float *kernels = kernel(p, &s, row, t, last, mask);
                load(values, row / p->heads, row % p->heads, t, last, channels, width, NULL, mask, s.more);
                multiply(p->landmarks, width, TILE, kernels, TILE, 1, s.more, width, parts + task * length, width,
                         t > begin);
            }
        }
        free(s.memory);
    }
    if (!failed) add_parts(parts, heads, spans, length, sums, p->threads);
    return -failed;
}

/* result = P^T W with W (batch * heads, landmarks, width). */
int softfree_spread(const Points *p, const float *w, size channels, const Tokens *result) {
    size tiles = tiles_of(p->count, TILE), heads = p->batch * p->heads, width = padded(channels);
    int failed = 0;
#pragma omp parallel num_threads(p->threads) reduction(| : failed)
    {
        Scratch s;
        failed |= reserve(&s, p, width);
#pragma omp for schedule(dynamic)
        for (size task = 0; task < heads * tiles; task++) {
            if (failed) continue;
            size row = task / tiles, begin = task % tiles * TILE, end = smaller(begin + TILE, p->count);
            const float *kernels = kernel(p, &s, row, begin, end, NULL);
            multiply(TILE, width, p->landmarks, kernels, 1, TILE, w + row * p->landmarks * width, width, s.more,
                     width, 0);
            store(s.more, width, result, row / p->heads, row % p->heads, begin, end, channels);
        }
        free(s.memory);
    }
    return -failed;
}

/* Gradients of tokens as queries, through X = P^T W with dX = grad (NULL if they are only keys), and as
   keys, through U = P V (values NULL if they are only queries). With E = P * (W dX^T + dU V^T),

       d values = P^T dU,   d tokens = scale (E^T L - colsum(E) tokens),   sums = E tokens, rowsum(E),

   where tokens and landmarks are relative to the centre. Landmarks are (batch * heads, landmarks, own
   width), sums have one more column, and w and grad_u are (batch * heads, landmarks, width). */
int softfree_backward(const Points *p, const uint8_t *masks, float scale, const float *landmarks, const Tokens *grad,
                      const float *w, const Tokens *values, const float *grad_u, size channels,
                      const Tokens *grad_tokens, const Tokens *grad_values, float *parts, float *sums) {
    size span = span_of(p->count), spans = tiles_of(p->count, span), heads = p->batch * p->heads, m = p->landmarks;
    size width = padded(channels), own = padded(p->channels), length = m * (own + 1);
    int failed = 0;
#pragma omp parallel num_threads(p->threads) reduction(| : failed)
    {
        Scratch s;
        failed |= reserve(&s, p, m + 2 * width + own);
        float *e = s.more, *loaded = e + TILE * m, *columns = loaded + TILE * width, *found = columns + TILE * width;
#pragma omp for schedule(dynamic)
        for (size task = 0; task < heads * spans; task++) {
            size row = task / spans, batch = row / p->heads, head = row % p->heads;
            size begin = task % spans * span, end = smaller(begin + span, p->count);
            const uint8_t *mask = masks ? masks + batch * p->count : NULL;
            float *part = parts + task * length;
            for (size t = begin; t < end && !failed; t += TILE) {
                size last = smaller(t + TILE, end);
                /* A masked token that is also a query still has its gradient as a query. */
                const float *kernels = kernel(p, &s, row, t, last, grad ? NULL : mask);
                if (grad) {
                    load(grad, batch, head, t, last, channels, width, NULL, NULL, loaded);
                    transpose(loaded, width, columns);
                    multiply(m, TILE, channels, w + row * m * width, width, 1, columns, TILE, e, TILE, 0);
                }
                if (values) {
                    load(values, batch, head, t, last, channels, width, NULL, mask, loaded);
                    transpose(loaded, width, columns);
                    multiply(m, TILE, channels, grad_u + row * m * width, width, 1, columns, TILE, e, TILE, !!grad);
                    multiply(TILE, width, m, kernels, 1, TILE, grad_u + row * m * width, width, loaded, width, 0);
                    for (size i = t; mask && i < last; i++)
                        if (!mask[i]) memset(loaded + (i - t) * width, 0, sizeof(float) * width);
                    store(loaded, width, grad_values, batch, head, t, last, channels);
                }
                vec by_token[TILE / LANES] = {0};
                for (size j = 0; j < m; j++) {
                    vec lanes = {0};
                    for (size i = 0; i < TILE / LANES; i++) {
                        vec *at = (vec *)(e + j * TILE) + i;
                        *at *= ((const vec *)(kernels + j * TILE))[i];
                        by_token[i] += *at;
                        lanes += *at;
                    }
                    float *sum = part + j * (own + 1) + own, by_landmark = t > begin ? *sum : 0;
                    for (size i = 0; i < LANES; i++) by_landmark += lanes[i];
                    *sum = by_landmark;
                }
                multiply(m, own, TILE, e, TILE, 1, s.rows, own, part, own + 1, t > begin);
                multiply(TILE, own, m, e, 1, TILE, landmarks + row * m * own, own, found, own, 0);
                for (size i = 0; i < TILE; i++) {
                    float total = by_token[i / LANES][i % LANES];
                    for (size c = 0; c < own; c++)
                        found[i * own + c] = scale * (found[i * own + c] - total * s.rows[i * own + c]);
                }
                store(found, own, grad_tokens, batch, head, t, last, p->channels);
            }
        }
        free(s.memory);
    }
    if (!failed) add_parts(parts, heads, spans, length, sums, p->threads);
    return -failed;
}

/* Compute the mean landmark, the landmarks minus that mean, (batch * heads, landmarks, channels), `side`
   as in Points, and A = kappa(L, L), (batch * heads, landmarks, landmarks). A landmark masked by a 0 in
   (batch, landmarks) is similar only to itself. farthest (batch * heads) is the largest ||l - c||^2 of each head. */
int softfree_prepare(const Tokens *landmarks, const uint8_t *masks, size batch, size heads, size m, size channels,
                     double scale, float *centre, double *centred, float *side, double *a, double *farthest,
                     size threads) {
    int failed = 0;
#pragma omp parallel for num_threads(threads) reduction(| : failed)
    for (size row = 0; row < batch * heads; row++) {
        const float *from = landmarks->data + row / heads * landmarks->by_batch + row % heads * landmarks->by_head;
        const uint8_t *mask = masks ? masks + row / heads * m : NULL;
        double *points = malloc(sizeof(double) * channels * m), *own = centred + row * m * channels;
        double *products = a + row * m * m, *norms = malloc(sizeof(double) * m);
        failed |= !points || !norms;
        if (!failed) {
            size present = 0;
            for (size j = 0; j < m; j++) present += !mask || mask[j];
            for (size c = 0; c < channels; c++) { /* in points, channels are rows */
                double sum = 0;
                for (size j = 0; j < m; j++) {
                    points[c * m + j] = mask && !mask[j] ? 0 : from[j * landmarks->by_token + c];
                    sum += points[c * m + j];
                }
                sum /= present ? present : 1;
                float rounded = sum; /* tokens and landmarks must lose the same */
                centre[row * channels + c] = rounded;
                for (size j = 0; j < m; j++) { /* a masked landmark stays at 0 and so is not far from the others */
                    if (!mask || mask[j]) points[c * m + j] -= rounded;
                    own[j * channels + c] = points[c * m + j];
                }
            }
            memset(products, 0, sizeof(double) * m * m);
            for (size i = 0; i < m; i++)
                for (size c = 0; c < channels; c++)
                    for (size j = 0; j < m; j++) products[i * m + j] += points[c * m + i] * points[c * m + j];
            for (size j = 0; j < m; j++) {
                float *of = side + (row * m + j) * (channels + 2);
                norms[j] = products[j * m + j];
                if (j == 0 || norms[j] > farthest[row]) farthest[row] = norms[j];
                for (size c = 0; c < channels; c++) of[c] = scale * LOG2_E * own[j * channels + c];
                of[channels] = -0.5 * scale * LOG2_E;
                of[channels + 1] = mask && !mask[j] ? -INFINITY : of[channels] * norms[j];
            }
            for (size i = 0; i < m; i++)
                for (size j = 0; j <= i; j++) {
                    double distance = norms[i] + norms[j] - 2 * products[i * m + j], value = i == j;
                    if (!mask || (mask[i] && mask[j])) value = exp(-0.5 * scale * (distance < 0 ? 0 : distance));
                    products[i * m + j] = products[j * m + i] = value;
                }
        }
        free(points);
        free(norms);
    }
    return -failed;
}

typedef double dvec __attribute__((vector_size(BYTES), aligned(8), may_alias));

/* row[0..PAD) += sign * sum over k < count of factors[k * stride] rows[k]. */
INLINE void add_rows(double *row, double sign, size count, const double *factors, size stride, const double *rows,
                     size width) {
    enum { vectors = PAD * sizeof(double) / BYTES };
    dvec sum[vectors];
    for (size v = 0; v < vectors; v++) sum[v] = ((const dvec *)row)[v];
    for (size k = 0; k < count; k++)
        for (size v = 0; v < vectors; v++) sum[v] += sign * factors[k * stride] * ((const dvec *)(rows + k * width))[v];
    for (size v = 0; v < vectors; v++) ((dvec *)row)[v] = sum[v];
}

/* Replace y (m, width) by C^-1 y, or by C^-T y if `transposed`. `factor` is C^T, upper triangular, and
   `pivot` is 1 over its diagonal. */
static void divide(double *y, size m, size width, const double *factor, const double *pivot, int transposed) {
    for (size column = 0; column < width; column += PAD)
        for (size step = 0; step < m; step++) {
            size i = transposed ? m - 1 - step : step;
            double *row = y + i * width + column;
            if (transposed)
                add_rows(row, -1, step, factor + i * m + i + 1, 1, row + width, width);
            else
                add_rows(row, -1, step, factor + i, m, y + column, width);
            for (size c = 0; c < PAD; c++) row[c] *= pivot[i];
        }
}

/* W = root Y root U, with Y = G (order 1) or G + ridge G^2 (order 2) and G = (A + ridge I)^-1. root is
   D^-1/2 with D = diag(A 1), or 1. U and W are (heads, landmarks, width). If `inverse` is not NULL, it
   receives C^-1 with A + ridge I = C C^T, (heads, landmarks, landmarks). */
int softfree_solve(const double *a, size heads, size m, double ridge, size order, size normalize, const float *u,
                   size channels, float *inverse, float *w, size threads) {
    size width = padded(channels), wide = padded(m), room = m * (width > wide ? width : wide);
    int failed = 0;
#pragma omp parallel for num_threads(threads) reduction(| : failed)
    for (size row = 0; row < heads; row++) {
        const float *from = u + row * m * width;
        double *memory = malloc(sizeof(double) * (m * m + m * width + room + 2 * m));
        double *factor = memory, *x = factor + m * m, *y = x + m * width, *root = y + room, *pivot = root + m;
        failed |= !memory;
        if (!memory) continue;
        memcpy(factor, a + row * m * m, sizeof(double) * m * m);
        for (size i = 0; i < m; i++) {
            double sum = 0;
            for (size j = 0; j < m; j++) sum += factor[i * m + j];
            root[i] = normalize ? 1 / sqrt(sum) : 1;
            factor[i * m + i] += ridge;
            for (size c = 0; c < width; c++) y[i * width + c] = x[i * width + c] = root[i] * from[i * width + c];
        }
        for (size k = 0; k < m; k++) { /* C^T, row by row */
            pivot[k] = 1 / sqrt(factor[k * m + k]);
            for (size j = k; j < m; j++) factor[k * m + j] *= pivot[k];
            for (size i = k + 1; i < m; i++)
                for (size j = i; j < m; j++) factor[i * m + j] -= factor[k * m + i] * factor[k * m + j];
        }
        for (size turn = 0; turn < order; turn++) { /* y = G x, then G (x + ridge G x) */
            if (turn > 0)
                for (size i = 0; i < m * width; i++) y[i] = x[i] + ridge * y[i];
            divide(y, m, width, factor, pivot, 0);
            divide(y, m, width, factor, pivot, 1);
        }
        for (size i = 0; i < m; i++)
            for (size c = 0; c < width; c++) w[(row * m + i) * width + c] = root[i] * y[i * width + c];
        if (inverse) {
            memset(y, 0, sizeof(double) * m * wide);
            for (size i = 0; i < m; i++) y[i * wide + i] = 1;
            divide(y, m, wide, factor, pivot, 0);
            for (size i = 0; i < m; i++)
                for (size j = 0; j < m; j++) inverse[(row * m + i) * m + j] = y[i * wide + j];
        }
        free(memory);
    }
    return -failed;
}

/* Replace y (m, width) by M^T M y with M lower triangular; `room` is as large as y. */
static void apply_inverse(double *y, size m, size width, const double *factor, double *room) {
    memset(room, 0, sizeof(double) * m * width);
    for (size column = 0; column < width; column += PAD)
        for (size i = 0; i < m; i++)
            add_rows(room + i * width + column, 1, i + 1, factor + i * m, 1, y + column, width);
    memset(y, 0, sizeof(double) * m * width);
    for (size column = 0; column < width; column += PAD)
        for (size i = 0; i < m; i++)
            add_rows(y + i * width + column, 1, m - i, factor + i * m + i, m, room + i * width + column, width);
}

/* products (m, wide) += left right^T for left and right (m, width of a row `stride` long). */
static void add_outer(const double *left, const double *right, size m, size width, size stride, double *turned,
                      double *products, size wide) {
    memset(turned, 0, sizeof(double) * width * wide);
    for (size j = 0; j < m; j++)
        for (size c = 0; c < width; c++) turned[c * wide + j] = right[j * stride + c];
    for (size i = 0; i < m; i++)
        for (size column = 0; column < wide; column += PAD)
            add_rows(products + i * wide + column, 1, width, left + i * stride, 1, turned + column, wide);
}

/* The gradient of softfree_solve, given dW: W again, dU = Y'^T dW, and the landmarks' gradient through A,
   (heads, landmarks, channels), see mixing_backward in mixing.py. `inverse` and `a` are what softfree_solve
   wrote and read, `points` the centred landmarks. A masked one has no entry in `a` beside the diagonal. With M
   the inverse factor, x = root U and g = root dW,

       once = G x, back = G g,    right = once, left = back                          (order 1)
       again = ridge G back,      right = G (x + ridge once), left = back + again    (order 2)

   -dA = back right^T + again once^T, W = root right, dU = root left. */
int softfree_solve_backward(const double *a, const float *inverse, const double *points, size heads, size m, size dims,
                            double scale, double ridge, size order, size normalize, const float *u, const float *grad_w,
                            size channels, float *w, float *grad_u, double *grad_points, size threads) {
    size width = padded(channels), both = 2 * width, wide = padded(m);
    int failed = 0;
#pragma omp parallel for num_threads(threads) reduction(| : failed)
    for (size row = 0; row < heads; row++) {
        const double *kernels = a + row * m * m, *at = points + row * m * dims;
        double *memory = malloc(sizeof(double) * (m * m + m * wide + 4 * m * both + width * wide + 2 * m));
        double *factor = memory, *grad_a = factor + m * m, *given = grad_a + m * wide, *once = given + m * both;
        double *twice = once + m * both, *room = twice + m * both, *turned = room + m * both;
        double *root = turned + width * wide, *rows = root + m;
        failed |= !memory;
        if (!memory) continue;
        for (size i = 0; i < m * m; i++) factor[i] = inverse[row * m * m + i];
        for (size i = 0; i < m; i++) {
            double sum = 0;
            for (size j = 0; j < m; j++) sum += kernels[i * m + j];
            root[i] = normalize ? 1 / sqrt(sum) : 1;
            for (size c = 0; c < width; c++) {
                given[i * both + c] = root[i] * u[(row * m + i) * width + c];
                given[i * both + width + c] = root[i] * grad_w[(row * m + i) * width + c];
            }
        }
        memcpy(once, given, sizeof(double) * m * both);
        apply_inverse(once, m, both, factor, room);
        const double *right = once, *back = once + width;
        memset(grad_a, 0, sizeof(double) * m * wide);
        if (order == 2) {
            for (size i = 0; i < m; i++)
                for (size c = 0; c < both; c++)
                    twice[i * both + c] = ridge * once[i * both + c] + (c < width ? given[i * both + c] : 0);
            apply_inverse(twice, m, both, factor, room);
            right = twice;
            add_outer(twice + width, once, m, width, both, turned, grad_a, wide);
        }
        add_outer(back, right, m, width, both, turned, grad_a, wide);
        for (size i = 0; i < m; i++) {
            rows[i] = 0;
            for (size c = 0; c < width; c++) {
                size place = i * both + c;
                double left = back[place] + (order == 2 ? twice[place + width] : 0);
                rows[i] += given[place + width] * right[place] + given[place] * left;
                w[(row * m + i) * width + c] = root[i] * right[place];
                grad_u[(row * m + i) * width + c] = root[i] * left;
            }
            rows[i] *= normalize ? 0.5 * root[i] * root[i] : 0;
        }
        double *found = grad_points + row * m * dims;
        memset(found, 0, sizeof(double) * m * dims);
        for (size i = 0; i < m; i++)
            for (size j = 0; j < m; j++) {
                double e = grad_a[i * wide + j] + grad_a[j * wide + i] + rows[i] + rows[j];
                e *= -scale * kernels[i * m + j];
                for (size c = 0; c < dims; c++) found[i * dims + c] += e * (at[j * dims + c] - at[i * dims + c]);
            }
        free(memory);
    }
    return -failed;
}
