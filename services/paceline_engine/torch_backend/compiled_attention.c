/* Attention of few rows, to keys and values where they lie: see compiled_attention.py.
 *
 * Theory of operation
 * -------------------
 *
 * A span is some rows of one sequence. The query heads that share a key head are rows of one
 * computation, up to `ROWS_AT_ONCE` of them. It goes through the keys in splits of 512:
 *
 *     products     16 keys are turned on their side, so that a vector has one number of each; then
 *                  every row adds its products one after the other, in the order of the head's width
 *     weights      e^(product - largest), and the sum of these in 16 lanes, then of the lanes
 *     values       weight times value, added one key after the other
 *
 *     out = (... ((split 0) * e^(largest 0 - largest 1) + split 1) ...) / sum of weights
 *
 * This is the order of torch's kernel for a CPU with AVX-512, whose products are MKL's. MKL adds up
 * to 384 keys one after the other, and more in two halves. So a span has two lengths: how many keys
 * a row sees, and how many torch's kernel would be given, hidden ones included.
 */

#include "compiled_steps.c"

#include <string.h>

#define SPLIT 512
#define MOST_IN_ORDER 384
#define ROWS_AT_ONCE 16
#define CHAINS 4 /* rows whose additions overlap */
#define MOST_WIDTH 256

/* Rows of a sequence; the fields of this and the next are those of attention_tables.py. Steps are
 * in numbers. */
struct span {
  float *keys, *values; /* of layer 0 and head 0 */
  long key_layer, key_head, value_layer, value_head;
  long first;  /* among the forward's rows */
  long count;  /* of the rows */
  long start;  /* the first row's place in the sequence */
  long length; /* of the keys that torch's kernel would be given */
};

/* How a layer attends: `group` query heads for each key head. */
struct attention {
  long layer, kv_heads, group, width;
  float scale;
};

struct row {
  const float *query;
  float *out;
  long sees;
  float largest, sum;
};

static void (*run_in_threads)(void (*)(void *), void *, unsigned, unsigned);
static int (*own_number)(void), (*thread_count)(void);

/* Take GOMP_parallel, omp_get_thread_num and omp_get_num_threads. */
void use_threads(void *run, void *number, void *count) {
  run_in_threads = run, own_number = number, thread_count = count;
}

/* e^x for x up to 0, as torch's kernel computes it, with an error of up to 20 units of the last
 * place: 2^n times a polynomial of the rest, and 0 below 2^-125. What is no number becomes the
 * largest one, so that the row's sum is infinite and the row no number either. */
static vector rough_exponential(vector x) {
  vector least = _mm512_set1_ps(-87.3365478515625f);
  x = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(88.72283935546875f)), least);
  vector power = _mm512_fmadd_ps(x, _mm512_set1_ps(1.4426950216293335f), _mm512_set1_ps(0.5f));
  power = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  vector rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(0.6931471824645996f), x);
  static const float factors[] = {0.00828929059f, 0.0418978221f, 0.166676521f,
                                  0.499991506f,   0.999999701f,  1.0f};
  vector sum = polynomial(rest, factors, sizeof factors / sizeof *factors);
  __mmask16 is_small = _mm512_cmp_ps_mask(power, _mm512_set1_ps(-125.0f), _CMP_LT_OQ);
  return _mm512_mask_mov_ps(_mm512_scalef_ps(sum, power), is_small, _mm512_setzero_ps());
}

/* Sum 16 lanes, the far ones first. */
static float sum_lanes(vector each) {
  each = _mm512_add_ps(each, _mm512_shuffle_f32x4(each, each, 0x4E));
  each = _mm512_add_ps(each, _mm512_shuffle_f32x4(each, each, 0xB1));
  each = _mm512_add_ps(each, _mm512_shuffle_ps(each, each, 0x4E));
  each = _mm512_add_ps(each, _mm512_shuffle_ps(each, each, 0xB1));
  return _mm512_cvtss_f32(each);
}

/* Turn a square of 16 by 16 numbers on its side. */
static void turn_square(const float *const rows[TOGETHER], long at, float *columns) {
  vector a[TOGETHER], b[TOGETHER];
  for (int n = 0; n < TOGETHER; n += 2) {
    vector even = load(rows[n] + at), odd = load(rows[n + 1] + at);
    a[n] = _mm512_unpacklo_ps(even, odd), a[n + 1] = _mm512_unpackhi_ps(even, odd);
  }
  for (int n = 0; n < TOGETHER; n += 4) {
    __m512d low = _mm512_castps_pd(a[n]), high = _mm512_castps_pd(a[n + 1]);
    __m512d low2 = _mm512_castps_pd(a[n + 2]), high2 = _mm512_castps_pd(a[n + 3]);
    b[n] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, low2));
    b[n + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, low2));
    b[n + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high, high2));
    b[n + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high, high2));
  }
  /* b[4 i + j] has rows 4 i to 4 i + 3 of columns j, j + 4, j + 8 and j + 12. */
  for (int n = 0; n < 4; n++) {
    a[n] = _mm512_shuffle_f32x4(b[n], b[n + 4], 0x88);
    a[n + 4] = _mm512_shuffle_f32x4(b[n], b[n + 4], 0xDD);
    a[n + 8] = _mm512_shuffle_f32x4(b[n + 8], b[n + 12], 0x88);
    a[n + 12] = _mm512_shuffle_f32x4(b[n + 8], b[n + 12], 0xDD);
  }
  for (int n = 0; n < 4; n++) {
    _mm512_storeu_ps(columns + n * TOGETHER, _mm512_shuffle_f32x4(a[n], a[n + 8], 0x88));
    _mm512_storeu_ps(columns + (n + 4) * TOGETHER,
                     _mm512_shuffle_f32x4(a[n + 4], a[n + 12], 0x88));
    _mm512_storeu_ps(columns + (n + 8) * TOGETHER, _mm512_shuffle_f32x4(a[n], a[n + 8], 0xDD));
    _mm512_storeu_ps(columns + (n + 12) * TOGETHER,
                     _mm512_shuffle_f32x4(a[n + 4], a[n + 12], 0xDD));
  }
}

/* Multiply rows by 16 keys that are turned. `count` is a constant wherever this is inlined. */
static inline __attribute__((always_inline)) void multiply_keys(int count, const struct row *rows,
                                                                const float *columns, long width,
                                                                vector *found) {
  vector sums[CHAINS];
  for (int r = 0; r < count; r++) sums[r] = _mm512_setzero_ps();
  for (long n = 0; n < width; n++) {
    vector column = load(columns + n * TOGETHER);
    for (int r = 0; r < count; r++)
      sums[r] = _mm512_fmadd_ps(_mm512_set1_ps(rows[r].query[n]), column, sums[r]);
  }
  for (int r = 0; r < count; r++) found[r] = sums[r];
}

/* The scaled products of rows and the split's first `seen` keys; minus infinity if hidden. */
static void multiply_split(int count, const struct row *rows, const float *keys, long split,
                           long seen, const struct attention *how, float (*weights)[SPLIT]) {
  float columns[MOST_WIDTH * TOGETHER];
  for (long i = 0; i < seen; i += TOGETHER) {
    const float *own[TOGETHER];
    for (int n = 0; n < TOGETHER; n++) /* behind the last key is somebody else's memory */
      own[n] = keys + (i + n < seen ? i + n : seen - 1) * how->width;
    for (long n = 0; n < how->width; n += TOGETHER)
      turn_square(own, n, columns + n * TOGETHER);
    for (int r = 0; r < count; r += CHAINS) {
      vector found[CHAINS] = {0};
      switch (count - r) {
      case 1: multiply_keys(1, rows + r, columns, how->width, found); break;
      case 2: multiply_keys(2, rows + r, columns, how->width, found); break;
      case 3: multiply_keys(3, rows + r, columns, how->width, found); break;
      default: multiply_keys(CHAINS, rows + r, columns, how->width, found);
      }
      for (int n = 0; n < CHAINS && r + n < count; n++) {
        long left = rows[r + n].sees - split - i;
        __mmask16 is_seen = left >= TOGETHER ? 0xffff : left > 0 ? (1 << left) - 1 : 0;
        vector each = _mm512_mul_ps(found[n], _mm512_set1_ps(how->scale));
        each = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), is_seen, each);
        _mm512_storeu_ps(weights[r + n] + i, each);
      }
    }
  }
}

/* Make weights of a row's products, and return by how much to multiply what it has summed. */
static float weigh(struct row *row, float *weights, long seen) {
  vector largest = _mm512_set1_ps(row->largest), sums = _mm512_setzero_ps();
  for (long i = 0; i < seen; i += TOGETHER) largest = _mm512_max_ps(largest, load(weights + i));
  float before = row->largest, own = _mm512_reduce_max_ps(largest);
  for (long i = 0; i < seen; i += TOGETHER) {
    vector each = rough_exponential(_mm512_sub_ps(load(weights + i), _mm512_set1_ps(own)));
    _mm512_storeu_ps(weights + i, each);
    sums = _mm512_add_ps(sums, each);
  }
  float factor = expf(before - own);
  row->sum = fmaf(factor, row->sum, sum_lanes(sums));
  row->largest = own;
  return factor;
}

/* Add weighted values to rows, for `vectors` times 16 numbers of the head's width. `count` and
 * `vectors` are constants wherever this is inlined. */
static inline __attribute__((always_inline)) void add_values(int count, int vectors,
                                                             struct row *rows, const float *values,
                                                             long width, long at, long begin,
                                                             long end, float (*weights)[SPLIT]) {
  vector sums[CHAINS][4];
  for (int r = 0; r < count; r++)
    for (int v = 0; v < vectors; v++) sums[r][v] = _mm512_setzero_ps();
  for (long i = begin; i < end; i++)
    for (int v = 0; v < vectors; v++) {
      vector value = load(values + i * width + at + v * TOGETHER);
      for (int r = 0; r < count; r++)
        sums[r][v] = _mm512_fmadd_ps(_mm512_set1_ps(weights[r][i]), value, sums[r][v]);
    }
  for (int r = 0; r < count; r++)
    for (int v = 0; v < vectors; v++) {
      float *out = rows[r].out + at + v * TOGETHER;
      _mm512_storeu_ps(out, _mm512_add_ps(load(out), sums[r][v]));
    }
}

static void add_part(int count, struct row *rows, const float *values, long width, long begin,
                     long end, float (*weights)[SPLIT]) {
  for (long at = 0; at < width; at += 2 * TOGETHER)
    switch (count) {
    case 1: add_values(1, 2, rows, values, width, at, begin, end, weights); break;
    case 2: add_values(2, 2, rows, values, width, at, begin, end, weights); break;
    case 3: add_values(3, 2, rows, values, width, at, begin, end, weights); break;
    default: add_values(CHAINS, 2, rows, values, width, at, begin, end, weights);
    }
}

/* Attend with up to `ROWS_AT_ONCE` rows; `length`: of the keys that torch's kernel would get. */
static void attend_rows(int count, struct row *rows, const float *keys, const float *values,
                        long length, const struct attention *how) {
  float weights[ROWS_AT_ONCE][SPLIT];
  long most = 0;
  for (int r = 0; r < count; r++) {
    memset(rows[r].out, 0, how->width * sizeof(float));
    if (rows[r].sees > most) most = rows[r].sees;
  }
  for (long split = 0; split < most; split += SPLIT) {
    long all = length - split < SPLIT ? length - split : SPLIT;
    long seen = most - split < all ? most - split : all;
    long half = all > MOST_IN_ORDER ? (all + 1) / 2 : all;
    multiply_split(count, rows, keys + split * how->width, split, seen, how, weights);
    for (int r = 0; r < count; r++) {
      if (rows[r].sees <= split) {
        memset(weights[r], 0, seen * sizeof(float));
        continue;
      }
      vector factor = _mm512_set1_ps(weigh(rows + r, weights[r], seen));
      if (split)
        for (long n = 0; n < how->width; n += TOGETHER)
          _mm512_storeu_ps(rows[r].out + n, _mm512_mul_ps(load(rows[r].out + n), factor));
    }
    for (int r = 0; r < count; r += CHAINS)
      for (long begin = 0; begin < seen; begin += half) {
        long end = begin + half < seen ? begin + half : seen;
        add_part(count - r, rows + r, values + split * how->width, how->width, begin, end,
                 weights + r);
      }
  }
  for (int r = 0; r < count; r++) {
    vector factor = _mm512_set1_ps(1.0f / rows[r].sum);
    for (long n = 0; n < how->width; n += TOGETHER)
      _mm512_storeu_ps(rows[r].out + n, _mm512_mul_ps(load(rows[r].out + n), factor));
  }
}

/* Attend with all rows of a span, for one key head. */
static void attend_head(const struct span *own, long head, const struct attention *how, long rows,
                        const float *states, float *seen) {
  const float *keys = own->keys + how->layer * own->key_layer + head * own->key_head;
  const float *values = own->values + how->layer * own->value_layer + head * own->value_head;
  struct row some[ROWS_AT_ONCE];
  int count = 0;
  for (long n = 0; n < own->count * how->group; n++) {
    long query_head = head * how->group + n % how->group, row = n / how->group;
    some[count++] = (struct row){
        .query = states + (query_head * rows + own->first + row) * how->width,
        .out = seen + ((own->first + row) * how->kv_heads * how->group + query_head) * how->width,
        .sees = own->start + row + 1,
        .largest = -INFINITY,
    };
    if (count < ROWS_AT_ONCE && n + 1 < own->count * how->group) continue;
    attend_rows(count, some, keys, values, own->length, how);
    count = 0;
  }
}

struct attending {
  const struct span *spans;
  long count, rows;
  const struct attention *how;
  const float *states;
  float *seen;
};

static void attend_part(const struct attending *task, long part, long parts) {
  long heads = task->how->kv_heads, all = task->count * heads;
  for (long n = all * part / parts; n < all * (part + 1) / parts; n++)
    attend_head(task->spans + n / heads, n % heads, task->how, task->rows, task->states,
                task->seen);
}

static void attend_own_part(void *task) { attend_part(task, own_number(), thread_count()); }

/* Keep the new keys and values of all spans, and attend. `states` has the query heads, then the key
 * heads, then the value heads: (heads, rows, width). `seen` gets (rows, query heads, width), zeros
 * for rows that are in no span. */
void attend_where_they_lie(const struct span *spans, long count, const struct attention *how,
                           long rows, const float *states, float *seen, unsigned threads) {
  long width = how->width, bytes = width * sizeof(float), inside = 0;
  const float *keys = states + how->group * how->kv_heads * rows * width;
  const float *values = keys + how->kv_heads * rows * width;
  for (const struct span *own = spans; own < spans + count; own++) {
    for (long h = 0; h < how->kv_heads; h++)
      for (long t = 0; t < own->count; t++) {
        long from = (h * rows + own->first + t) * width, to = (own->start + t) * width;
        memcpy(own->keys + how->layer * own->key_layer + h * own->key_head + to, keys + from,
               bytes);
        memcpy(own->values + how->layer * own->value_layer + h * own->value_head + to,
               values + from, bytes);
      }
    inside += own->count;
  }
  if (inside < rows) memset(seen, 0, rows * how->group * how->kv_heads * bytes);
  struct attending task = {spans, count, rows, how, states, seen};
  if (threads > 1 && count * how->kv_heads > 1)
    run_in_threads(attend_own_part, &task, threads, 0);
  else
    attend_part(&task, 0, 1);
}
