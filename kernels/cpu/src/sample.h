// Draws tokens from logits: temperature, top-k, top-p, min-p, Gumbel-max with counter-based random numbers.
// The C++ twin of batchinfer/engine/sampler.py and random.py: the same steps, the same random numbers.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "vec.h"

namespace batchinfer {

// Philox 4x32-10 (Salmon et al. 2011) of `LANES` consecutive blocks: words[j][i] is word j of block first + i.
template <int LANES>
static void philox(uint32_t first, uint32_t position, uint64_t key, uint32_t (&words)[4][LANES]) {
  for (int i = 0; i < LANES; i++) words[0][i] = first + i, words[1][i] = position, words[2][i] = words[3][i] = 0;
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
  for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
    for (int i = 0; i < LANES; i++) {
      const uint64_t p0 = (uint64_t)words[0][i] * 0xD2511F53u, p1 = (uint64_t)words[2][i] * 0xCD9E8D57u;
      words[0][i] = (uint32_t)(p1 >> 32) ^ words[1][i] ^ k0;
      words[1][i] = (uint32_t)p1;
      words[2][i] = (uint32_t)(p0 >> 32) ^ words[3][i] ^ k1;
      words[3][i] = (uint32_t)p0;
    }
}

static float gumbel(uint32_t word) {
  const float v = (float)((word + 0.5) * 0x1p-32);
  return -std::log(-std::log1p(-v));
}

struct SampleParams {
  float temperature, min_p;
  int64_t top_k;
  double top_p;
  uint64_t key;
  int64_t position;
  bool cuts() const { return top_k > 0 || top_p < 1 || min_p > 0; }
};

struct Best {
  float score = -std::numeric_limits<float>::infinity();
  int id = -1;
  void offer(float other, int other_id) {
    if (other > score || id < 0 || (other == score && other_id < id)) score = other, id = other_id;
  }
};

// x [V] scaled logits, largest 0. Only where noise could still win is it worked out: -log1p(-v) >= v, so
// x - log(-log1p(-v)) > best needs v < exp(x - best).
static int draw_whole(const float* x, int V, const SampleParams& params) {
  Best best;
  const int top = (int)(std::max_element(x, x + V) - x);
  uint32_t one[4][1];
  philox<1>(top / 4, (uint32_t)params.position, params.key, one);
  best.offer(x[top] + gumbel(one[top % 4][0]), top);
  for (int begin = 0; begin < V; begin += 64) {
    uint32_t words[4][16];
    philox<16>(begin / 4, (uint32_t)params.position, params.key, words);
    alignas(64) float limit[64];
    const int count = std::min(64, V - begin);
    if (count == 64) {
      for (int i = 0; i < 64; i += 16)
        store(limit + i, exp2(mul(sub(load(x + begin + i), splat(best.score)), splat(LOG2E))));
    } else {
      for (int i = 0; i < count; i++) limit[i] = std::exp(x[begin + i] - best.score);
    }
    for (int i = 0; i < count; i++) {
      const uint32_t word = words[i % 4][i / 4];
      // A little above: the limit is rounded, and best may only have grown since.
      if (word * 0x1p-32f < limit[i] * 1.0001f + 0x1p-30f) best.offer(x[begin + i] + gumbel(word), begin + i);
    }
  }
  return best.id;
}

struct Candidate {
  float x;
  int id;
  bool operator<(const Candidate& other) const { return x != other.x ? x > other.x : id < other.id; }
};

// What top-k, then top-p, then min-p leave, most probable first.
static void truncate(const float* x, int V, const SampleParams& params, std::vector<Candidate>& kept) {
  kept.clear();
  double total = 0;
  for (int i = 0; i < V; i++)
    if (x[i] > -std::numeric_limits<float>::infinity()) kept.push_back({x[i], i});
  size_t sorted = 0;
  auto sort_to = [&](size_t count) {
    count = std::min(count, kept.size());
    if (count <= sorted) return;
    if (count < kept.size()) std::nth_element(kept.begin() + sorted, kept.begin() + count - 1, kept.end());
    std::sort(kept.begin() + sorted, kept.begin() + count);
    sorted = count;
  };
  if (params.top_k > 0 && (size_t)params.top_k < kept.size()) {
    sort_to((size_t)params.top_k);
    kept.resize(sorted);
  }
  for (const Candidate& c : kept) total += std::exp(c.x);
  const float highest = (float)(1 / total);  // of the most probable id, whose x is 0
  double before = 0;
  size_t count = 0;
  for (;; count++) {
    if (count == kept.size()) break;
    if (count == sorted) sort_to(sorted ? sorted * 8 : 64);
    const float prob = (float)(std::exp(kept[count].x) / total);
    if (count > 0 && ((params.top_p < 1 && before >= params.top_p) || prob < params.min_p * highest)) break;
    before += prob;
  }
  kept.resize(count);
}

// logits [rows, V], turned into scaled and truncated ones when `writes`. One id of each row.
static void sample(float* logits, int rows, int V, const SampleParams* params, bool writes, int32_t* ids) {
#pragma omp parallel for schedule(dynamic, 1)
  for (int row = 0; row < rows; row++) {
    thread_local std::vector<float> scaled;
    thread_local std::vector<Candidate> kept;
    scaled.resize(V);
    const SampleParams& p = params[row];
    float* x = logits + (int64_t)row * V;
    const float top = *std::max_element(x, x + V);
    for (int i = 0; i < V; i++) scaled[i] = (x[i] - top) / p.temperature;
    if (!p.cuts()) {
      ids[row] = draw_whole(scaled.data(), V, p);
      if (writes) memcpy(x, scaled.data(), sizeof(float) * V);
      continue;
    }
    truncate(scaled.data(), V, p, kept);
    Best best;
    for (const Candidate& c : kept) {
      uint32_t words[4][1];
      philox<1>(c.id / 4, (uint32_t)p.position, p.key, words);
      best.offer(c.x + gumbel(words[c.id % 4][0]), c.id);
    }
    ids[row] = std::max(best.id, 0);  // NaN leaves no candidate; the row is known to be broken
    if (writes) {
      std::fill(x, x + V, -std::numeric_limits<float>::infinity());
      for (const Candidate& c : kept) x[c.id] = c.x;
    }
  }
}

}  // namespace batchinfer
