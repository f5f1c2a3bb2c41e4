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

// Per row and lane, over the panels of a group.
struct LaneState {
  F16 top, id, high, sum, moment;
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

BI_INLINE void take_sum(LaneState& s, F16 x, bool wants_moment) {
  const F16 high = max(s.high, x), log2e = splat(LOG2E);
  const F16 shift = sub(s.high, high), distance = sub(x, high);
  const F16 factor = exp2(mul(shift, log2e)), weight = exp2(mul(distance, log2e));
  if (wants_moment) s.moment = fma(weight, distance, mul(factor, fma(s.sum, shift, s.moment)));
  s.sum = fma(s.sum, factor, weight);
  s.high = high;
}

// hidden [rows, K] times the packed head [V, K]. logits: [rows, V] fp32 or null. A row whose logits are not all
// finite gets lse NaN and top NaN.
static void head(const bf16* hidden, const bf16* w, int rows, int V, int K, int num_ids, float* logits,
                 const HeadOut& out) {
  const int vectors = (V + 15) / 16, panels = (vectors + COLS - 1) / COLS;
  const int groups = (panels + GROUP_PANELS - 1) / GROUP_PANELS, chunks = (rows + ROW_CHUNK - 1) / ROW_CHUNK;
  const bool wants_sum = out.lse != nullptr, wants_moment = out.entropy != nullptr;
  std::vector<Partial> partials((size_t)rows * groups);
  std::vector<uint8_t> is_bad((size_t)rows * groups, 0);
  alignas(64) float iota[16];
  for (int i = 0; i < 16; i++) iota[i] = (float)i;
  constexpr float lowest = -std::numeric_limits<float>::infinity();
#pragma omp parallel for schedule(dynamic, 1)
  for (int item = 0; item < groups * chunks; item++) {
    const int group = item % groups, begin = item / groups * ROW_CHUNK, end = std::min(rows, begin + ROW_CHUNK);
    thread_local std::vector<LaneState> states;
    thread_local std::vector<F16> bad;
    states.assign(end - begin, {splat(lowest), splat(0.f), splat(MASKED), splat(0.f), splat(0.f)});
    bad.assign(end - begin, splat(0.f));
    auto sink = [&](int row, int column, F16 x) {
      if (logits && column + 16 <= V) store(logits + (int64_t)row * V + column, x);
      F16 id = add(load(iota), splat((float)column)), masked = x;
      if (column + 16 > V || column + 16 > num_ids) {
        alignas(64) float lanes[16];
        store(lanes, x);
        if (logits && column + 16 > V)
          for (int i = 0; column + i < V; i++) logits[(int64_t)row * V + column + i] = lanes[i];
        // Padding of the packed weights is nobody's logit; ids without text have one, but are never drawn.
        x = where_greater(id, splat((float)V - 0.5f), splat(MASKED), x);
        masked = where_greater(id, splat((float)num_ids - 0.5f), splat(lowest), x);
      }
      if (out.target && out.target[row] >= column && out.target[row] < column + 16) {
        alignas(64) float lanes[16];
        store(lanes, x);
        out.target_logit[row] = lanes[out.target[row] - column];
      }
      bad[row - begin] = add(bad[row - begin], sub(x, x));  // NaN for NaN and for infinity
      LaneState& s = states[row - begin];
      s.id = where_greater(masked, s.top, id, s.id);
      s.top = where_greater(masked, s.top, masked, s.top);
      if (wants_sum) take_sum(s, x, wants_moment);
    };
    for (int p = group * GROUP_PANELS; p < std::min(panels, (group + 1) * GROUP_PANELS); p++)
      panel<COLS>(hidden, K, w, K, begin, end, p * COLS * 16, std::min(COLS, vectors - p * COLS), sink);
    for (int row = begin; row < end; row++) {
      alignas(64) float top[16], id[16], high[16], sum[16], moment[16], check[16];
      const LaneState& s = states[row - begin];
      store(top, s.top), store(id, s.id), store(high, s.high), store(sum, s.sum), store(moment, s.moment);
      store(check, bad[row - begin]);
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
