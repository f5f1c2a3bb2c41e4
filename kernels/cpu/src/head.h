// The language-model head: bf16 operands, fp32 logits left unrounded, reduced while they are in registers.
#pragma once
#include <limits>
#include <vector>

#include "gemm.h"
#include "ops.h"

namespace batchinfer {

constexpr int GROUP_PANELS = 16;  // panels of COLS * 16 outputs that are reduced together, in lane order

struct HeadOut {
  float* top;          // [rows] the largest logit of ids below num_ids
  int32_t* argmax;     // [rows] its lowest id
  float* lse;          // [rows] logsumexp over all ids, or null
  float* entropy;      // [rows] nats, or null (needs lse)
  const int32_t* target;  // [rows] or null
  float* target_logit;    // [rows]
};

// Per row and lane, over the panels of a group; what every row needs lies apart from what few want.
struct LaneStates {
  std::vector<F16> top, id, check, high, sum, moment;
  void reset(int rows, bool wants_sum) {
    top.assign(rows, splat(-std::numeric_limits<float>::infinity()));
    id.assign(rows, splat(0.f));
    check.assign(rows, splat(0.f));  // NaN once a logit was NaN or infinite
    if (!wants_sum) return;
    high.assign(rows, splat(MASKED));
    sum.assign(rows, splat(0.f));
    moment.assign(rows, splat(0.f));
  }
  void take_sum(int row, F16 x, bool wants_moment) {
    const F16 new_high = max(high[row], x), log2e = splat(LOG2E);
    const F16 shift = sub(high[row], new_high), distance = sub(x, new_high);
    const F16 factor = exp2(mul(shift, log2e)), weight = exp2(mul(distance, log2e));
    if (wants_moment) moment[row] = fma(weight, distance, mul(factor, fma(sum[row], shift, moment[row])));
    sum[row] = fma(sum[row], factor, weight);
    high[row] = new_high;
  }
};

// logsumexp and the first moment of exp(x - high), merged in order.
struct Partial {
  float top = -std::numeric_limits<float>::infinity();
  int32_t id = 0;
  float high = MASKED, sum = 0, moment = 0;
  void merge(float other_high, float other_sum, float other_moment) {
    float new_high = std::max(high, other_high);
    float a = std::exp2((high - new_high) * LOG2E), b = std::exp2((other_high - new_high) * LOG2E);
    // sum of p * (x - high): moving the reference moves each term by the difference
    moment = a * (moment + sum * (high - new_high)) + b * (other_moment + other_sum * (other_high - new_high));
    sum = a * sum + b * other_sum;
    high = new_high;
  }
};

struct HeadSink {
  int begin, V, num_ids;  // first row of the chunk
  float* logits;
  const int32_t* target;
  float* target_logit;
  bool wants_sum, wants_moment;
  LaneStates& lanes;

  template <int R, int C>
  __attribute__((always_inline)) void operator()(int row, int column, F16 (&acc)[R][C]) const {
    const bool is_whole = column + C * 16 <= std::min(V, num_ids);
    alignas(64) float iota[16];
    for (int i = 0; i < 16; i++) iota[i] = (float)(column + i);
    for (int r = 0; r < R; r++) {
      const int at = row + r - begin;
      F16 top = lanes.top[at], id = lanes.id[at], check = lanes.check[at];
      BI_UNROLL for (int c = 0; c < C; c++) {
        F16 x = acc[r][c], place = add(load(iota), splat((float)(c * 16))), drawable = x;
        check = add(check, sub(x, x));
        if (logits) write(row + r, column + c * 16, x);
        if (!is_whole) {
          // Padding of the packed weights is nobody's logit; ids without text have one, but are never drawn.
          x = where_greater(place, splat((float)V - 0.5f), splat(MASKED), x);
          drawable = where_greater(place, splat((float)std::min(V, num_ids) - 0.5f),
                                   splat(-std::numeric_limits<float>::infinity()), x);
        }
        id = where_greater(drawable, top, place, id);
        top = where_greater(drawable, top, drawable, top);
        if (target) pick(row + r, column + c * 16, x);
        if (wants_sum) lanes.take_sum(at, x, wants_moment);
      }
      lanes.top[at] = top, lanes.id[at] = id, lanes.check[at] = check;
    }
  }
  void write(int row, int column, F16 x) const {
    float* to = logits + (int64_t)row * V + column;
    if (column + 16 <= V) return store(to, x);
    alignas(64) float values[16];
    store(values, x);
    for (int i = 0; column + i < V; i++) to[i] = values[i];
  }
  void pick(int row, int column, F16 x) const {
    if (target[row] < column || target[row] >= column + 16) return;
    alignas(64) float values[16];
    store(values, x);
    target_logit[row] = values[target[row] - column];
  }
};

// hidden [rows, K] times the packed head [V, K]. logits: [rows, V] fp32 or null. A row whose logits are not all
// finite gets lse NaN and top NaN.
static void head(const bf16* hidden, const bf16* w, int rows, int V, int K, int num_ids, float* logits,
                 const HeadOut& out) {
  const int vectors = (V + 15) / 16, panels = (vectors + COLS - 1) / COLS;
  const int threads = omp_get_max_threads();
  const int groups = (panels + GROUP_PANELS - 1) / GROUP_PANELS, chunks = (rows + ROW_CHUNK - 1) / ROW_CHUNK;
  const bool wants_sum = out.lse != nullptr, wants_moment = out.entropy != nullptr;
  std::vector<Partial> partials((size_t)rows * groups);
  std::vector<uint8_t> is_bad((size_t)rows * groups, 0);
#pragma omp parallel for schedule(dynamic, 1)
  for (int item = 0; item < groups * chunks; item++) {
    const int group = item % groups, begin = item / groups * ROW_CHUNK, end = std::min(rows, begin + ROW_CHUNK);
    thread_local LaneStates lanes;
    lanes.reset(end - begin, wants_sum);
    const HeadSink sink{begin, V, num_ids, logits, out.target, out.target_logit, wants_sum, wants_moment, lanes};
    for (int p = group * GROUP_PANELS; p < std::min(panels, (group + 1) * GROUP_PANELS); p++) {
      const int next = p + 1 < (group + 1) * GROUP_PANELS ? p + 1 : (group + threads) * GROUP_PANELS;
      panel<COLS, 1>(hidden, K, w, K, begin, end, p * COLS * 16, std::min(COLS, vectors - p * COLS), sink,
                     next < panels ? panel_of<COLS>(w, next * COLS, vectors, K) : Ahead());
    }
    for (int row = begin; row < end; row++) {
      const int at = row - begin;
      alignas(64) float top[16], id[16], check[16], high[16], sum[16], moment[16];
      store(top, lanes.top[at]), store(id, lanes.id[at]), store(check, lanes.check[at]);
      if (wants_sum) store(high, lanes.high[at]), store(sum, lanes.sum[at]), store(moment, lanes.moment[at]);
      Partial& partial = partials[(size_t)row * groups + group];
      for (int i = 0; i < 16; i++) {
        if (top[i] > partial.top || (top[i] == partial.top && (int32_t)id[i] < partial.id))
          partial.top = top[i], partial.id = (int32_t)id[i];
        if (wants_sum) partial.merge(high[i], sum[i], moment[i]);
        if (!(check[i] == 0.f)) is_bad[(size_t)row * groups + group] = 1;
      }
    }
  }
#pragma omp parallel for schedule(static)
  for (int row = 0; row < rows; row++) {
    Partial all = partials[(size_t)row * groups];
    bool broken = is_bad[(size_t)row * groups];
    for (int g = 1; g < groups; g++) {
      const Partial& next = partials[(size_t)row * groups + g];
      if (next.top > all.top) all.top = next.top, all.id = next.id;
      if (wants_sum) all.merge(next.high, next.sum, next.moment);
      broken |= is_bad[(size_t)row * groups + g];
    }
    const float nan = std::numeric_limits<float>::quiet_NaN();
    out.top[row] = broken ? nan : all.top;
    out.argmax[row] = all.id;
    if (wants_sum) out.lse[row] = broken ? nan : all.high + std::log(all.sum);
    // -sum p log p = lse - sum p x = log(sum) - sum p (x - high)
    if (wants_moment) out.entropy[row] = broken ? nan : std::log(all.sum) - all.moment / all.sum;
  }
}

}  // namespace batchinfer
