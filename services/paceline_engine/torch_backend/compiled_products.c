/* Products in eight bits for few rows, and a layer of them: see compiled_products.py.
 *
 * Theory of operation
 * -------------------
 *
 * A product of few rows takes as long as it takes to read the weight from memory, so the weight is
 * read once, in the order in which it lies. It lies as oneDNN packed it, and is nobody's copy:
 *
 *     block 0: outputs 0 to 63                    block 1: outputs 64 to 127       ...
 *     | inputs 0-3 | inputs 4-7 | ... | zeros |   | inputs 0-3 | ...
 *       |
 *       256 bytes: | output 0: 4 inputs | output 1: 4 inputs | ... | output 63: 4 inputs |
 *                    vector 0: outputs 0 to 15                ...    vector 3: 48 to 63
 *
 * A block has zeros up to a multiple of 64 inputs, and the last block up to 64 outputs. One
 * instruction of VNNI (vpdpbusd) multiplies 64 bytes of it by 4 of a row, the same for all outputs,
 * and adds four products each to 16 sums of 32 bits. Up to `AT_ONCE` rows have their sums in
 * registers, 4 vectors a row; the next rows find the block in the cache.
 *
 *     sum of (u - 128) * w  =  sum of u * w  +  zeros,     zeros[output] = -128 * sum of w
 *
 * These are sums of whole numbers, so oneDNN's are the same in whichever order it adds. Its code
 * for AMX converts the two parts to float before it adds them, which rounds parts above 2^24; then
 * `apart` says so. What follows has the order of `Int8Product`: times the output's scale, times the
 * row's, plus the bias.
 *
 * Threads divide a product's blocks. They are those of torch's own OpenMP, which Python looks up,
 * so that there are no other threads than `--threads` allows, and none waits for work in a way of
 * its own.
 */

#include "compiled_groups.c"

#define BLOCK 64
#define VECTORS 4
#define AT_ONCE 6
#define AHEAD 8192 /* bytes: measured (bench/LOG.md) */

/* The fields are those of compiled_products.py. `bits` are those of a weight in groups, as
 * compiled_groups.c has them; then `zeros` and `scales` are NULL. 0: a weight as oneDNN packed it.
 */
struct product {
  const void *weight;
  const int32_t *zeros;
  const float *scales, *bias; /* bias: or NULL */
  long outputs, inputs, apart, bits, has_halves;
};

/* Into the heads and out of them, gate and up side by side, and down. */
enum { INTO_HEADS, OUT_OF_HEADS, GATE_AND_UP, DOWN, PRODUCTS };

struct layer {
  struct product products[PRODUCTS];
  const float *norms[2];
  float least[2];
  long heads, kv_heads, width;
};

/* Memory for what is computed in between, for as many rows as there can be. */
struct room {
  float *rows, *added, *product, *states, *seen;
  uint8_t *whole;
  float *scales;
};

struct task {
  const struct product *product;
  long rows;
  const uint8_t *whole;
  const float *scales;
  float *out;
};

/* Sum a block for so many rows. `count` is a constant wherever this is inlined. */
static inline __attribute__((always_inline)) void sum_rows(int count, const int8_t *weight,
                                                           long inputs, const uint8_t *whole,
                                                           __m512i found[][VECTORS]) {
  __m512i sums[AT_ONCE][VECTORS];
#pragma GCC unroll 8
  for (int t = 0; t < count; t++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) sums[t][v] = _mm512_setzero_si512();
  for (long n = 0; n < inputs; n += 4, weight += 4 * BLOCK) {
    __m512i own[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) {
      own[v] = _mm512_loadu_si512(weight + v * BLOCK);
      _mm_prefetch((const char *)weight + AHEAD + v * BLOCK, _MM_HINT_T0);
    }
#pragma GCC unroll 8
    for (int t = 0; t < count; t++) {
      int32_t four;
      memcpy(&four, whole + t * inputs + n, sizeof four);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++)
        sums[t][v] = _mm512_dpbusd_epi32(sums[t][v], _mm512_set1_epi32(four), own[v]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < count; t++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) found[t][v] = sums[t][v];
}

static void sum_block(int count, const int8_t *weight, long inputs, const uint8_t *whole,
                      __m512i found[][VECTORS]) {
  switch (count) {
  case 1: sum_rows(1, weight, inputs, whole, found); break;
  case 2: sum_rows(2, weight, inputs, whole, found); break;
  case 3: sum_rows(3, weight, inputs, whole, found); break;
  case 4: sum_rows(4, weight, inputs, whole, found); break;
  case 5: sum_rows(5, weight, inputs, whole, found); break;
  default: sum_rows(AT_ONCE, weight, inputs, whole, found);
  }
}

/* Scale a row's sums, and store them; `output` is the first of 64, of which some may not exist. */
static void store_block(const struct product *own, long output, const __m512i *sums, float scale,
                        float *out) {
  for (int v = 0; v < VECTORS; v++, output += TOGETHER) {
    long left = own->outputs - output;
    if (left <= 0) return;
    __mmask16 some = left < TOGETHER ? (1 << left) - 1 : 0xffff;
    __m512i zeros = _mm512_maskz_loadu_epi32(some, own->zeros + output);
    vector each = own->apart
                      ? _mm512_add_ps(_mm512_cvtepi32_ps(sums[v]), _mm512_cvtepi32_ps(zeros))
                      : _mm512_cvtepi32_ps(_mm512_add_epi32(sums[v], zeros));
    each = _mm512_mul_ps(each, _mm512_maskz_loadu_ps(some, own->scales + output));
    each = _mm512_mul_ps(each, _mm512_set1_ps(scale));
    if (own->bias) each = _mm512_add_ps(each, _mm512_maskz_loadu_ps(some, own->bias + output));
    _mm512_mask_storeu_ps(out + output, some, each);
  }
}

/* A thread's part of a product: some blocks of outputs, all rows. */
static void multiply_part(const struct task *task, long part, long parts) {
  const struct product *own = task->product;
  if (own->bits) {
    long panels = (own->outputs + TOGETHER - 1) / TOGETHER;
    multiply_panels(own->bits, own->has_halves, own->weight, own->bias, own->outputs, own->inputs,
                    panels * part / parts, panels * (part + 1) / parts, task->rows, task->whole,
                    task->scales, task->out);
    return;
  }
  const int8_t *weight = own->weight;
  long blocks = (own->outputs + BLOCK - 1) / BLOCK;
  long bytes = (own->inputs + BLOCK - 1) / BLOCK * BLOCK * BLOCK;
  for (long b = blocks * part / parts; b < blocks * (part + 1) / parts; b++)
    for (long t = 0; t < task->rows;) {
      __m512i sums[AT_ONCE][VECTORS];
      int count = task->rows - t < AT_ONCE ? task->rows - t : AT_ONCE;
      sum_block(count, weight + b * bytes, own->inputs, task->whole + t * own->inputs, sums);
      for (int n = 0; n < count; n++, t++)
        store_block(own, b * BLOCK, sums[n], task->scales[t], task->out + t * own->outputs);
    }
}

static void multiply_own_part(void *task) { multiply_part(task, own_number(), thread_count()); }

static void multiply(const struct product *own, long rows, const struct room *room, float *out,
                     unsigned threads) {
  struct task task = {own, rows, room->whole, room->scales, out};
  if (threads > 1)
    run_in_threads(multiply_own_part, &task, threads, 0);
  else
    multiply_part(&task, 0, 1);
}

/* Where a step rounds rows for a product: nowhere, if that rounds them in groups. */
static uint8_t *rounded_for(const struct product *own, const struct room *room) {
  return own->bits ? NULL : room->whole;
}

/* Round rows in groups, if the product needs it. */
static void round_for(const struct product *own, const struct room *room, long rows,
                      const float *hidden) {
  long inputs = own->inputs;
  if (own->bits)
    for (long t = 0; t < rows; t++)
      round_groups(inputs, hidden + t * inputs, room->whole + t * inputs,
                   room->scales + 2 * t * (inputs / GROUP));
}

/* A product of rows that are rounded first. */
void multiply_rows(const struct product *own, const struct room *room, long rows,
                   const float *hidden, float *out, unsigned threads) {
  if (!own->bits)
    for (long t = 0; t < rows; t++)
      round_row(own->inputs, hidden + t * own->inputs, room->whole + t * own->inputs,
                room->scales + t);
  round_for(own, room, rows, hidden);
  multiply(own, rows, room, out, threads);
}

/* A layer up to attention: `states` are heads apart, (heads, rows, width). */
void before_attention(const struct layer *own, const struct room *room, long rows,
                      const float *hidden, const float *cosines, const float *sines, float *states,
                      unsigned threads) {
  const struct product *product = own->products + INTO_HEADS;
  norm_rows(rows, product->inputs, hidden, NULL, 0, own->norms[0], own->least[0], room->rows,
            rounded_for(product, room), room->scales);
  round_for(product, room, rows, room->rows);
  multiply(product, rows, room, room->product, threads);
  turn_rows(rows, own->heads + 2 * own->kv_heads, own->heads + own->kv_heads, own->width,
            room->product, NULL, cosines, sines, states);
}

/* A layer from attention on: `seen` has heads of rows, which lie as steps say. */
void after_attention(const struct layer *own, const struct room *room, long rows, const float *seen,
                     long head_step, long row_step, const float *hidden, float *out,
                     unsigned threads) {
  const struct product *products = own->products;
  long width = products[OUT_OF_HEADS].outputs, inner = products[DOWN].inputs;
  round_heads(rows, own->heads, own->width, seen, head_step, row_step, room->rows,
              rounded_for(products + OUT_OF_HEADS, room), room->scales);
  round_for(products + OUT_OF_HEADS, room, rows, room->rows);
  multiply(products + OUT_OF_HEADS, rows, room, room->added, threads);
  norm_rows(rows, width, hidden, room->added, 0, own->norms[1], own->least[1], room->rows,
            rounded_for(products + GATE_AND_UP, room), room->scales);
  round_for(products + GATE_AND_UP, room, rows, room->rows);
  multiply(products + GATE_AND_UP, rows, room, room->product, threads);
  gate_rows(rows, inner, room->product, 0, room->rows, rounded_for(products + DOWN, room),
            room->scales);
  round_for(products + DOWN, room, rows, room->rows);
  multiply(products + DOWN, rows, room, out, threads);
  add_rows(rows, width, out, NULL, room->added);
}

/* A layer whose keys and values lie as spans say; `out` may be `hidden`. */
static void whole_layer(const struct layer *own, const struct room *room, long rows,
                        const float *hidden, const float *cosines, const float *sines,
                        const struct span *spans, long count, const struct attention *how,
                        float *out, unsigned threads) {
  before_attention(own, room, rows, hidden, cosines, sines, room->states, threads);
  attend_where_they_lie(spans, count, how, rows, room->states, room->seen, threads);
  after_attention(own, room, rows, room->seen, own->width, own->heads * own->width, hidden, out,
                  threads);
}

/* Layers one after the other; layer n attends as `hows[n]` says. */
void whole_layers(const struct layer *const *layers, const struct attention *const *hows,
                  long depth, const struct room *room, long rows, const float *hidden,
                  const float *cosines, const float *sines, const struct span *spans, long count,
                  float *out, unsigned threads) {
  for (long n = 0; n < depth; n++)
    whole_layer(layers[n], room, rows, n ? out : hidden, cosines, sines, spans, count, hows[n],
                out, threads);
}
