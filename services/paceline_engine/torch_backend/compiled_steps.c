/* What a layer computes between its products, for few rows: see compiled_steps.py.
 *
 * Each function gives the bits of torch's operators. So the order of additions, and where a product
 * and a sum are rounded once instead of twice, is torch's; nothing else may be contracted
 * (-ffp-contract=off). All widths are multiples of 16 numbers.
 */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#define TOGETHER 16
#define MOST 127
#define ZERO 128
#define LEAST_SCALE 1e-30f

typedef __m512 vector;

static vector load(const float *at) { return _mm512_loadu_ps(at); }

/* The square root of a row's squares, added as `torch.linalg.vector_norm` does: in eight sums. */
static float length_of(const float *row, long width) {
  __m256 sums = _mm256_setzero_ps();
  for (long n = 0; n < width; n += 8) {
    __m256 each = _mm256_loadu_ps(row + n);
    sums = _mm256_add_ps(sums, _mm256_mul_ps(each, each));
  }
  float parts[8];
  _mm256_storeu_ps(parts, sums);
  float sum = parts[0];
  for (int n = 1; n < 8; n++) sum += parts[n];
  return sqrtf(sum);
}

/* Round a row to whole numbers, as `Int8Product` does, and store its scale. */
static void round_row(long width, const float *row, uint8_t *whole, float *scale) {
  vector largest = _mm512_setzero_ps();
  __mmask16 is_nan = 0;
  for (long n = 0; n < width; n += TOGETHER) {
    vector each = load(row + n);
    largest = _mm512_max_ps(largest, _mm512_abs_ps(each));
    is_nan |= _mm512_cmp_ps_mask(each, each, _CMP_UNORD_Q);
  }
  float own = _mm512_reduce_max_ps(largest) * (float)(1.0 / MOST);
  if (own < LEAST_SCALE) own = LEAST_SCALE;
  if (is_nan) own = NAN; /* so that the product says it, too */
  *scale = own;
  vector divisor = _mm512_set1_ps(own), zero = _mm512_set1_ps(ZERO);
  for (long n = 0; n < width; n += TOGETHER) {
    vector each = _mm512_div_ps(load(row + n), divisor);
    each = _mm512_roundscale_ps(each, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512i numbers = _mm512_cvttps_epi32(_mm512_add_ps(each, zero));
    _mm_storeu_si128((__m128i *)(whole + n), _mm512_cvtepi32_epi8(numbers));
  }
}

/* A polynomial of x; the first factor is that of the highest power. */
static inline vector polynomial(vector x, const float *factors, int count) {
  vector sum = _mm512_set1_ps(factors[0]);
  for (int n = 1; n < count; n++) sum = _mm512_fmadd_ps(sum, x, _mm512_set1_ps(factors[n]));
  return sum;
}

/* e^x, as Sleef computes it with an error below one unit of the last place (Sleef_expf16_u10). */
static vector exponential(vector x) {
  vector power = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896340736f)),
                                      _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  vector rest = _mm512_fmadd_ps(power, _mm512_set1_ps(-0.693145751953125f), x);
  rest = _mm512_fmadd_ps(power, _mm512_set1_ps(-1.428606765330187045e-06f), rest);
  static const float factors[] = {0.000198527617612853646278381f, 0.00139304355252534151077271f,
                                  0.00833336077630519866943359f,  0.0416664853692054748535156f,
                                  0.166666671633720397949219f,    0.5f};
  vector sum = polynomial(rest, factors, sizeof factors / sizeof *factors);
  sum = _mm512_fmadd_ps(_mm512_mul_ps(rest, rest), sum, rest);
  sum = _mm512_scalef_ps(_mm512_add_ps(_mm512_set1_ps(1.0f), sum), power);
  __mmask16 is_large = _mm512_cmp_ps_mask(x, _mm512_set1_ps(104.0f), _CMP_GT_OQ);
  __mmask16 is_small = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-104.0f), _CMP_LT_OQ);
  sum = _mm512_mask_mov_ps(sum, is_large, _mm512_set1_ps(INFINITY));
  return _mm512_mask_mov_ps(sum, is_small, _mm512_setzero_ps());
}

/* added = added * scale + hidden; scales: of each row, or NULL. */
void add_rows(long rows, long width, float *added, const float *scales, const float *hidden) {
  for (long t = 0; t < rows; t++) {
    vector scale = _mm512_set1_ps(scales ? scales[t] : 1.0f);
    for (long n = t * width; n < (t + 1) * width; n += TOGETHER) {
      vector each = _mm512_mul_ps(load(added + n), scale);
      _mm512_storeu_ps(added + n, _mm512_add_ps(each, load(hidden + n)));
    }
  }
}

/* The norm of each row; also rounded, if there is room for it. `scales` belong to `added` before,
 * if that is not NULL, and to the rounded rows afterwards. */
void norm_rows(long rows, long width, const float *hidden, float *added, int is_scaled,
               const float *weight, float least, float *normed, uint8_t *whole, float *scales) {
  for (long t = 0; t < rows; t++) {
    const float *row = hidden + t * width;
    float *own = normed + t * width;
    if (added) {
      add_rows(1, width, added + t * width, is_scaled ? scales + t : 0, row);
      row = added + t * width;
    }
    float length = length_of(row, width);
    /* torch contracts the second square of a short row. */
    vector divisor = _mm512_set1_ps(sqrtf(fmaf(least, least, length * length)));
    for (long n = 0; n < width; n += TOGETHER)
      _mm512_storeu_ps(own + n,
                       _mm512_mul_ps(_mm512_div_ps(load(row + n), divisor), load(weight + n)));
    if (whole) round_row(width, own, whole + t * width, scales + t);
  }
}

/* silu(gate) * up of rows that have them side by side; also rounded, as in `norm_rows`. */
void gate_rows(long rows, long width, const float *gate_up, int is_scaled, float *gated,
               uint8_t *whole, float *scales) {
  vector one = _mm512_set1_ps(1.0f);
  for (long t = 0; t < rows; t++) {
    const float *gates = gate_up + 2 * t * width, *ups = gates + width;
    float *own = gated + t * width;
    vector scale = _mm512_set1_ps(is_scaled ? scales[t] : 1.0f);
    for (long n = 0; n < width; n += TOGETHER) {
      vector gate = _mm512_mul_ps(load(gates + n), scale);
      vector up = _mm512_mul_ps(load(ups + n), scale);
      vector minus = _mm512_sub_ps(_mm512_set1_ps(-0.0f), gate);
      vector silu = _mm512_div_ps(gate, _mm512_add_ps(one, exponential(minus)));
      _mm512_storeu_ps(own + n, _mm512_mul_ps(silu, up));
    }
    if (whole) round_row(width, own, whole + t * width, scales + t);
  }
}

/* Heads of rows, (rows, heads, width), to (heads, rows, width), the first `turned` of them rotated
 * to their positions. */
void turn_rows(long rows, long heads, long turned, long width, const float *states,
               const float *scales, const float *cosines, const float *sines, float *out) {
  long half = width / 2;
  for (long t = 0; t < rows; t++) {
    vector scale = _mm512_set1_ps(scales ? scales[t] : 1.0f);
    for (long h = 0; h < heads; h++) {
      const float *from = states + (t * heads + h) * width;
      float *to = out + (h * rows + t) * width;
      for (long n = 0; n < width; n += TOGETHER) {
        vector each = _mm512_mul_ps(load(from + n), scale);
        if (h < turned) {
          vector other = _mm512_mul_ps(load(from + (n < half ? n + half : n - half)), scale);
          vector part = _mm512_mul_ps(other, load(sines + t * width + n));
          each = _mm512_fmadd_ps(each, load(cosines + t * width + n), part);
        }
        _mm512_storeu_ps(to + n, each);
      }
    }
  }
}

/* Put the heads of each row together, which lie apart; also rounded, as in `norm_rows`. */
void round_heads(long rows, long heads, long width, const float *seen, long head_step,
                 long row_step, float *row, uint8_t *whole, float *scales) {
  for (long t = 0; t < rows; t++) {
    float *own = row + t * heads * width;
    for (long h = 0; h < heads; h++)
      for (long n = 0; n < width; n += TOGETHER)
        _mm512_storeu_ps(own + h * width + n, load(seen + h * head_step + t * row_step + n));
    if (whole) round_row(heads * width, own, whole + t * heads * width, scales + t);
  }
}
