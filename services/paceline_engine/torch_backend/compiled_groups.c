/* Products of weights in groups, in four bits or eight: see grouped_linear.py.
 *
 * Theory of operation
 * -------------------
 *
 * A weight's numbers are unsigned, 0 to 15 or 0 to 255. They lie in panels of 16 outputs, in the
 * order in which they are read, with the scale and the least number of each group of 32 inputs
 * before them:
 *
 *     panel 0: outputs 0 to 15                                panel 1 ...
 *     | group 0                                       | group 1 ...
 *     | 16 scales | 16 least | vector 0 | vector 1 | ...
 *                                |
 *     four bits, 4 vectors:      | output 0: inputs 0-3 low, 4-7 high | output 1 ... | output 15 |
 *     eight bits, 8 vectors:     | output 0: inputs 0-3               | output 1 ... | output 15 |
 *
 * Scales and least numbers have 16 bits where these hold them exactly, and 32 where they do not.
 * Rows have eight bits, signed, with a scale for each group, too. One instruction of VNNI
 * (vpdpbusd) multiplies 4 inputs of 16 outputs by 4 of a row, and adds to 16 sums of 32 bits. Up to
 * `ROWS_OF_PANELS` rows are multiplied by what is unpacked once. With AMX 16 rows are:
 * a tile of 16 rows by 32 inputs, times a tile of 32 inputs by 16 outputs.
 *
 *     out = 0
 *     for each group:  out = fma(row scale * float(sum of x * q), scale, out)
 *                      out = fma(row scale * float(sum of x),     least, out)
 *     out + bias
 *
 * A group's sums are whole numbers below 2^24, and `out` has one order of additions for each row
 * and output. So a row has the same bits whatever rows are beside it, with any number of threads:
 * they divide panels. `multiply_slowly` says the same with one number after the other.
 */

#include "compiled_attention.c"

#define GROUP 32
#define ROWS_OF_PANELS 8
#define ROWS_OF_TILES 16
#define ROWS_IN_CACHE 32
#ifdef __AMX_INT8__
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif
#define PANEL_AHEAD 2048 /* bytes: measured (bench/LOG.md) */

/* Round a row's groups to whole numbers. `scales` are the groups' scales, and then the groups' sums
 * with their scales. */
static void round_groups(long width, const float *row, uint8_t *whole, float *scales) {
  long groups = width / GROUP;
  for (long g = 0; g < groups; g++, row += GROUP, whole += GROUP) {
    vector first = load(row), second = load(row + TOGETHER);
    vector each = _mm512_max_ps(_mm512_abs_ps(first), _mm512_abs_ps(second));
    __mmask16 is_nan = _mm512_cmp_ps_mask(first, second, _CMP_UNORD_Q);
    float largest = _mm512_reduce_max_ps(each);
    if (largest < LEAST_SCALE) largest = LEAST_SCALE;
    float scale = largest * (float)(1.0 / MOST);
    if (is_nan) scale = NAN; /* so that the product says it, too */
    vector factor = _mm512_set1_ps(MOST / largest);
    __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(first, factor));
    __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(second, factor));
    _mm_storeu_si128((__m128i *)whole, _mm512_cvtepi32_epi8(low));
    _mm_storeu_si128((__m128i *)(whole + TOGETHER), _mm512_cvtepi32_epi8(high));
    scales[g] = scale;
    scales[groups + g] = scale * (float)_mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
  }
}

/* A panel of a weight, and rows. */
struct panel {
  const uint8_t *weight, *whole;
  const float *scales;
  long groups;
};

/* Read a group of a panel: its scales and least numbers, and its numbers as unsigned bytes; return
 * where the next one begins. The numbers given are constants where this is inlined. */
static inline __attribute__((always_inline)) const uint8_t *
unpack_group(int bits, int is_half, const uint8_t *weight, vector *scale, vector *least,
             __m512i own[GROUP / 4]) {
  __m512i low_bits = _mm512_set1_epi8(15);
  _mm_prefetch((const char *)weight + PANEL_AHEAD, _MM_HINT_T0);
  if (is_half) {
    *scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)weight));
    *least = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)weight + 1));
    weight += 2 * TOGETHER * sizeof(short);
  } else {
    *scale = load((const float *)weight), *least = load((const float *)weight + TOGETHER);
    _mm_prefetch((const char *)weight + PANEL_AHEAD + 64, _MM_HINT_T0);
    weight += 2 * TOGETHER * sizeof(float);
  }
#pragma GCC unroll 8
  for (int n = 0; n < GROUP / 4; n += 8 / bits, weight += 64) {
    own[n] = _mm512_loadu_si512(weight);
    _mm_prefetch((const char *)weight + PANEL_AHEAD, _MM_HINT_T0);
    if (bits == 4) {
      own[n + 1] = _mm512_and_si512(_mm512_srli_epi16(own[n], 4), low_bits);
      own[n] = _mm512_and_si512(own[n], low_bits);
    }
  }
  return weight;
}

/* Add a group's part to a row's sums. `row` is the scale of the row's group. */
static inline __attribute__((always_inline)) vector add_group(vector sum, __m512i dot,
                                                              const float *row, long groups,
                                                              vector scale, vector least) {
  vector each = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), _mm512_set1_ps(row[0]));
  sum = _mm512_fmadd_ps(each, scale, sum);
  return _mm512_fmadd_ps(_mm512_set1_ps(row[groups]), least, sum);
}

/* Multiply so many rows by a panel. The numbers are constants where this is inlined. */
static inline __attribute__((always_inline)) void
multiply_panel(int count, int bits, int is_half, const struct panel *panel, vector *found) {
  const uint8_t *weight = panel->weight, *whole = panel->whole;
  const float *scales = panel->scales;
  long groups = panel->groups;
  vector sums[ROWS_OF_PANELS];
#pragma GCC unroll 8
  for (int t = 0; t < count; t++) sums[t] = _mm512_setzero_ps();
  for (long g = 0; g < groups; g++, whole += GROUP, scales++) {
    vector scale, least;
    __m512i own[GROUP / 4];
    weight = unpack_group(bits, is_half, weight, &scale, &least, own);
#pragma GCC unroll 8
    for (int t = 0; t < count; t++) {
      __m512i dot = _mm512_setzero_si512();
#pragma GCC unroll 8
      for (int n = 0; n < GROUP / 4; n++) {
        int32_t four;
        memcpy(&four, whole + t * groups * GROUP + n * 4, sizeof four);
        dot = _mm512_dpbusd_epi32(dot, own[n], _mm512_set1_epi32(four));
      }
      sums[t] = add_group(sums[t], dot, scales + 2 * t * groups, groups, scale, least);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < count; t++) found[t] = sums[t];
}

#ifdef __AMX_INT8__

/* As the instruction that configures tiles reads it. */
struct tiles {
  uint8_t palette, start, nothing[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

/* What a group of a tile of rows gives, until it is added. */
struct group_sums {
  int32_t dots[ROWS_OF_TILES][TOGETHER];
  vector scale, least;
};

/* Multiply a tile of rows by a group. Tiles have constant numbers. */
#define MULTIPLY_TILE(sums, rows, weights)                                                        \
  /* Compilers do not know that a tile is loaded from memory. */                                  \
  __asm__ volatile("" : : "r"(own) : "memory");                                                   \
  _tile_zero(sums);                                                                               \
  _tile_loadd(rows, whole + g * GROUP, groups * GROUP);                                           \
  _tile_loadd(weights, own, 64);                                                                  \
  _tile_dpbsud(sums, rows, weights);

/* Multiply `ROWS_OF_TILES` rows by a panel. While a group is multiplied the one before it is added. */
static inline __attribute__((always_inline)) void
multiply_in_tiles(int bits, int is_half, const struct panel *panel, vector *found) {
  const uint8_t *weight = panel->weight, *whole = panel->whole;
  long groups = panel->groups;
  struct group_sums parts[2];
  vector sums[ROWS_OF_TILES];
#pragma GCC unroll 16
  for (int t = 0; t < ROWS_OF_TILES; t++) sums[t] = _mm512_setzero_ps();
  for (long g = 0; g <= groups; g++) {
    if (g < groups) {
      __m512i own[GROUP / 4];
      struct group_sums *next = parts + g % 2;
      weight = unpack_group(bits, is_half, weight, &next->scale, &next->least, own);
      if (g % 2) {
        MULTIPLY_TILE(1, 3, 5)
      } else {
        MULTIPLY_TILE(0, 2, 4)
      }
    }
    if (!g) continue;
    struct group_sums *last = parts + (g - 1) % 2;
    if (g % 2)
      _tile_stored(0, last->dots, 64);
    else
      _tile_stored(1, last->dots, 64);
#pragma GCC unroll 16
    for (int t = 0; t < ROWS_OF_TILES; t++)
      sums[t] = add_group(sums[t], _mm512_loadu_si512(last->dots[t]),
                          panel->scales + 2 * t * groups + g - 1, groups, last->scale,
                          last->least);
  }
#pragma GCC unroll 16
  for (int t = 0; t < ROWS_OF_TILES; t++) found[t] = sums[t];
}

/* Configure tiles for `multiply_in_tiles`. Others' configuration comes back afterwards. */
static void use_tiles(struct tiles *before) {
  struct tiles own = {.palette = 1};
  for (int n = 0; n < 6; n++) {
    own.rows[n] = n < 4 ? ROWS_OF_TILES : GROUP / 4;
    own.bytes[n] = n == 2 || n == 3 ? GROUP : 64;
  }
  _tile_storeconfig(before);
  /* Some versions of GCC think that 8 bytes are loaded, and leave the others unwritten. */
  __asm__ volatile("" : : "r"(&own) : "memory");
  _tile_loadconfig(&own);
}

static void give_tiles_back(const struct tiles *before) {
  if (before->palette)
    _tile_loadconfig(before);
  else
    _tile_release();
}

#else

struct tiles {
  int nothing;
};
#define multiply_in_tiles(bits, is_half, panel, found) (void)0
static void use_tiles(struct tiles *before) { (void)before; }
static void give_tiles_back(const struct tiles *before) { (void)before; }

#endif

#define OF_ROWS(rows, bits, is_half)                                                              \
  case rows: multiply_panel(rows, bits, is_half, panel, found); break;

#define OF_KIND(name, bits, is_half)                                                              \
  static void name(int count, const struct panel *panel, vector *found) {                         \
    switch (count) {                                                                              \
      OF_ROWS(1, bits, is_half)                                                                   \
      OF_ROWS(2, bits, is_half)                                                                   \
      OF_ROWS(3, bits, is_half)                                                                   \
      OF_ROWS(4, bits, is_half)                                                                   \
      OF_ROWS(5, bits, is_half)                                                                   \
      OF_ROWS(6, bits, is_half)                                                                   \
      OF_ROWS(7, bits, is_half)                                                                   \
      OF_ROWS(ROWS_OF_PANELS, bits, is_half)                                                      \
    default: multiply_in_tiles(bits, is_half, panel, found);                                      \
    }                                                                                             \
  }

OF_KIND(multiply_four_bits, 4, 0)
OF_KIND(multiply_four_bits_with_halves, 4, 1)
OF_KIND(multiply_eight_bits, 8, 0)
OF_KIND(multiply_eight_bits_with_halves, 8, 1)

static void (*const of_kinds[2][2])(int, const struct panel *, vector *) = {
    {multiply_four_bits, multiply_four_bits_with_halves},
    {multiply_eight_bits, multiply_eight_bits_with_halves},
};

/* Multiply rows, which are rounded in groups, by panels [first, last). */
static void multiply_panels(long bits, int is_half, const uint8_t *weight, const float *bias,
                            long outputs, long inputs, long first, long last, long rows,
                            const uint8_t *whole, const float *scales, float *out) {
  long groups = inputs / GROUP;
  long beside = 2 * (is_half ? sizeof(short) : sizeof(float));
  long bytes = groups * TOGETHER * (GROUP * bits / 8 + beside);
  struct tiles before;
  if (HAS_TILES && rows >= ROWS_OF_TILES) use_tiles(&before);
  for (long start = 0; start < rows; start += ROWS_IN_CACHE) {
    long end = rows - start < ROWS_IN_CACHE ? rows : start + ROWS_IN_CACHE;
    for (long p = first; p < last; p++) {
      long output = p * TOGETHER, left = outputs - output;
      __mmask16 some = left < TOGETHER ? (1 << left) - 1 : 0xffff;
      vector added = bias ? _mm512_maskz_loadu_ps(some, bias + output) : _mm512_setzero_ps();
      for (long t = start; t < end;) {
        vector found[ROWS_OF_TILES];
        int most = HAS_TILES && end - t >= ROWS_OF_TILES ? ROWS_OF_TILES : ROWS_OF_PANELS;
        int count = end - t < most ? end - t : most;
        struct panel panel = {weight + p * bytes, whole + t * inputs, scales + 2 * t * groups,
                              groups};
        of_kinds[bits == 8][is_half](count, &panel, found);
        for (int n = 0; n < count; n++, t++)
          _mm512_mask_storeu_ps(out + t * outputs + output, some, _mm512_add_ps(found[n], added));
      }
    }
  }
  if (HAS_TILES && rows >= ROWS_OF_TILES) give_tiles_back(&before);
}

/* The same as `multiply_rows`, from numbers that are not packed: (outputs, inputs), and scales and
 * least numbers, (outputs, groups). Only to compare it with. */
void multiply_slowly(const uint8_t *numbers, const float *scales, const float *least,
                     const float *bias, long outputs, long inputs, long rows, const float *hidden,
                     float *out) {
  long groups = inputs / GROUP;
  for (long t = 0; t < rows; t++)
    for (long o = 0; o < outputs; o++) {
      float sum = 0;
      for (long g = 0; g < groups; g++) {
        const float *row = hidden + t * inputs + g * GROUP;
        const uint8_t *own = numbers + o * inputs + g * GROUP;
        float largest = LEAST_SCALE;
        for (int n = 0; n < GROUP; n++) largest = fmaxf(largest, fabsf(row[n]));
        float scale = largest * (float)(1.0 / MOST), factor = MOST / largest;
        long products = 0, whole = 0;
        for (int n = 0; n < GROUP; n++) {
          long each = lrintf(row[n] * factor);
          products += each * own[n], whole += each;
        }
        sum = fmaf(scale * (float)products, scales[o * groups + g], sum);
        sum = fmaf(scale * (float)whole, least[o * groups + g], sum);
      }
      out[t * outputs + o] = sum + (bias ? bias[o] : 0);
    }
}
