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
 * `ROWS_OF_PANELS` rows are multiplied by what is unpacked once.
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
#define ROWS_IN_CACHE 32
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

/* Multiply so many rows by a panel. The numbers are constants where this is inlined. */
static inline __attribute__((always_inline)) void
multiply_panel(int count, int bits, int is_half, const struct panel *panel, vector *found) {
  const uint8_t *weight = panel->weight, *whole = panel->whole;
  const float *scales = panel->scales;
  long groups = panel->groups;
  vector sums[ROWS_OF_PANELS];
  __m512i low_bits = _mm512_set1_epi8(15);
#pragma GCC unroll 8
  for (int t = 0; t < count; t++) sums[t] = _mm512_setzero_ps();
  for (long g = 0; g < groups; g++, whole += GROUP, scales++) {
    vector scale, least;
    if (is_half) {
      scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)weight));
      least = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)weight + 1));
      _mm_prefetch((const char *)weight + PANEL_AHEAD, _MM_HINT_T0);
      weight += 2 * TOGETHER * sizeof(short);
    } else {
      scale = load((const float *)weight), least = load((const float *)weight + TOGETHER);
      _mm_prefetch((const char *)weight + PANEL_AHEAD, _MM_HINT_T0);
      _mm_prefetch((const char *)weight + PANEL_AHEAD + 64, _MM_HINT_T0);
      weight += 2 * TOGETHER * sizeof(float);
    }
    __m512i own[GROUP / 4];
#pragma GCC unroll 8
    for (int n = 0; n < GROUP / 4; n += 8 / bits, weight += 64) {
      own[n] = _mm512_loadu_si512(weight);
      _mm_prefetch((const char *)weight + PANEL_AHEAD, _MM_HINT_T0);
      if (bits == 4) {
        own[n + 1] = _mm512_and_si512(_mm512_srli_epi16(own[n], 4), low_bits);
        own[n] = _mm512_and_si512(own[n], low_bits);
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < count; t++) {
      __m512i dot = _mm512_setzero_si512();
#pragma GCC unroll 8
      for (int n = 0; n < GROUP / 4; n++) {
        int32_t four;
        memcpy(&four, whole + t * groups * GROUP + n * 4, sizeof four);
        dot = _mm512_dpbusd_epi32(dot, own[n], _mm512_set1_epi32(four));
      }
      const float *row = scales + 2 * t * groups;
      vector each = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), _mm512_set1_ps(row[0]));
      sums[t] = _mm512_fmadd_ps(each, scale, sums[t]);
      sums[t] = _mm512_fmadd_ps(_mm512_set1_ps(row[groups]), least, sums[t]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < count; t++) found[t] = sums[t];
}

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
    default: multiply_panel(ROWS_OF_PANELS, bits, is_half, panel, found);                         \
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
  for (long start = 0; start < rows; start += ROWS_IN_CACHE) {
    long end = rows - start < ROWS_IN_CACHE ? rows : start + ROWS_IN_CACHE;
    for (long p = first; p < last; p++) {
      long output = p * TOGETHER, left = outputs - output;
      __mmask16 some = left < TOGETHER ? (1 << left) - 1 : 0xffff;
      vector added = bias ? _mm512_maskz_loadu_ps(some, bias + output) : _mm512_setzero_ps();
      for (long t = start; t < end;) {
        vector found[ROWS_OF_PANELS];
        int count = end - t < ROWS_OF_PANELS ? end - t : ROWS_OF_PANELS;
        struct panel panel = {weight + p * bytes, whole + t * inputs, scales + 2 * t * groups,
                              groups};
        of_kinds[bits == 8][is_half](count, &panel, found);
        for (int n = 0; n < count; n++, t++)
          _mm512_mask_storeu_ps(out + t * outputs + output, some, _mm512_add_ps(found[n], added));
      }
    }
  }
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
