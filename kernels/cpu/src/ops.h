// The ops between the matrix products. Statistics and transcendental functions in fp32, results rounded to bf16
// where transformers rounds them.
#pragma once
#include <cmath>

#include "attention.h"
#include "vec.h"

namespace batchinfer {

// Sum of the lanes in a fixed order.
BI_INLINE float reduce_add(F16 x) {
  alignas(64) float lanes[16];
  store(lanes, x);
  for (int step = 8; step; step /= 2)
    for (int i = 0; i < step; i++) lanes[i] += lanes[i + step];
  return lanes[0];
}

// out = weight * bf16((x) / rms(x)) of one row of n values, n a multiple of 16.
BI_INLINE void norm_row(const bf16* x, const bf16* weight, float eps, bf16* out, int n) {
  F16 squares = splat(0.f);
  for (int i = 0; i < n; i += 16) {
    F16 value = load_widen(x + i);
    squares = fma(value, value, squares);
  }
  const F16 scale = splat(1.f / std::sqrt(reduce_add(squares) / n + eps));
  for (int i = 0; i < n; i += 16)
    store_narrow(out + i, mul(rounded(mul(load_widen(x + i), scale)), load_widen(weight + i)));
}

// residual += x (unless x is null); out = norm of the sum. All [rows, n].
static void rms_norm(const bf16* x, bf16* residual, const bf16* weight, float eps, bf16* out, int rows, int n) {
#pragma omp parallel for schedule(static)
  for (int r = 0; r < rows; r++) {
    bf16* sum = residual + (int64_t)r * n;
    if (x)
      for (int i = 0; i < n; i += 16)
        store_narrow(sum + i, add(load_widen(sum + i), load_widen(x + (int64_t)r * n + i)));
    norm_row(sum, weight, eps, out + (int64_t)r * n, n);
  }
}

// out [rows, n] = silu(gate) * up of gate_up [rows, 2 n]; n a multiple of 16.
static void silu_and_mul(const bf16* gate_up, bf16* out, int rows, int n) {
#pragma omp parallel for schedule(static)
  for (int r = 0; r < rows; r++) {
    const bf16 *gate = gate_up + (int64_t)r * 2 * n, *up = gate + n;
    for (int i = 0; i < n; i += 16)
      store_narrow(out + (int64_t)r * n + i, mul(rounded(silu(load_widen(gate + i))), load_widen(up + i)));
  }
}

struct RopeTables {
  const float *cos, *sin;  // [positions, dim / 2]
  int dim;                 // rotated channels of a head
};

// Rotates the head in place, in fp32; channels from rope.dim on pass.
BI_INLINE void rotate(float* x, const RopeTables& rope, int position) {
  const int half = rope.dim / 2;
  const float *cos = rope.cos + (int64_t)position * half, *sin = rope.sin + (int64_t)position * half;
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    const F16 first = load(x + i), second = load(x + i + half), c = load(cos + i), s = load(sin + i);
    store(x + i, sub(mul(first, c), mul(second, s)));
    store(x + i + half, add(mul(second, c), mul(first, s)));
  }
  for (; i < half; i++) {
    float first = x[i], second = x[i + half];
    x[i] = first * cos[i] - second * sin[i];
    x[i + half] = second * cos[i] + first * sin[i];
  }
}

// The first token of thread `part` of `parts`: two tokens that lie in one pair of the cache stay together, as each
// half is stored by changing the pair.
static int first_token(const int64_t* slots, int tokens, int part, int parts) {
  int t = (int)((int64_t)tokens * part / parts);
  if (t > 0 && t < tokens && slots[t] % 2 == 1 && slots[t - 1] == slots[t] - 1) t++;
  return t;
}

// Fetches where the token of *slot is to be stored: a line for each pair of K's channels. Nothing where the token before
// it, in whose lines it lies, has had them fetched.
static void fetch_kv_lines(const int64_t* slot, const Heads& heads, int block_size, const bf16* kv_cache) {
  const int64_t block = *slot / block_size, place = *slot % block_size, half = (int64_t)block_size * heads.dim;
  if (place % GROUP && slot[-1] == *slot - 1) return;
  for (int h = 0; h < heads.num_kv_heads; h++) {
    const bf16* k = kv_cache + (block * heads.num_kv_heads + h) * 2 * half + place / GROUP * GROUP * heads.dim;
    const bf16* v = k + half + place % GROUP / 2 * heads.dim * 2;
    for (int d = 0; d < heads.dim / 2; d++) prefetch(k + d * GROUP * 2);
    for (int d = 0; d < heads.dim * 2; d += 32) prefetch(v + d);
  }
}

// qkv [tokens, (heads + 2 kv heads) * dim] -> q [tokens, heads, dim] rotated and scaled, k and v into the cache.
// q_norm, k_norm: [dim] or null. slots: block * block_size + place of each token. is_finite [tokens]: cleared where
// a token's KV holds NaN or infinity.
static void rope_and_store_kv(const bf16* qkv, const bf16* q_norm, const bf16* k_norm, float eps,
                              const RopeTables& rope, const int32_t* positions, const int64_t* slots, int tokens,
                              const Heads& heads, float scale, int block_size, bf16* q, bf16* kv_cache, uint8_t* is_finite) {
  constexpr int AHEAD = 2;  // tokens; a new token's lines come from memory
  const int dim = heads.dim, width = heads.num_heads + 2 * heads.num_kv_heads;
#pragma omp parallel
  {
    const int parts = omp_get_num_threads(), part = omp_get_thread_num();
    const int end = first_token(slots, tokens, part + 1, parts);
    for (int t = first_token(slots, tokens, part, parts); t < end; t++) {
      const bf16* row = qkv + (int64_t)t * width * dim;
      alignas(64) float x[256];
      alignas(64) bf16 narrowed[256];
      auto read = [&](const bf16* from, const bf16* norm) {
        if (norm) norm_row(from, norm, eps, narrowed, dim), from = narrowed;
        for (int d = 0; d < dim; d += 16) store(x + d, load_widen(from + d));
        rotate(x, rope, positions[t]);
      };
      if (t + AHEAD < end) fetch_kv_lines(slots + t + AHEAD, heads, block_size, kv_cache);
      for (int h = 0; h < heads.num_heads; h++) {
        read(row + h * dim, q_norm);
        bf16* out = q + ((int64_t)t * heads.num_heads + h) * dim;
        for (int d = 0; d < dim; d += 16) store_narrow(out + d, mul(load(x + d), splat(scale)));
      }
      const int64_t block = slots[t] / block_size, group = slots[t] % block_size / GROUP;
      const int token = slots[t] % GROUP;
      for (int h = 0; h < heads.num_kv_heads; h++) {
        bf16* k = kv_cache + (block * heads.num_kv_heads + h) * 2 * block_size * dim + group * GROUP * dim;
        bf16* v = k + (int64_t)block_size * dim + token / 2 * dim * 2;
        read(row + (heads.num_heads + h) * dim, k_norm);
        for (int d = 0; d < dim; d += 16) store_narrow(narrowed + d, load(x + d));
        for (int d = 0; d < dim; d += 2) memcpy(k + (d / 2 * GROUP + token) * 2, narrowed + d, 4);
        const bf16* value = row + (heads.num_heads + heads.num_kv_heads + h) * dim;
        for (int d = 0; d < dim; d += 16) store_halves(v + d * 2, value + d, token % 2);
        if (!all_finite(narrowed, dim) || !all_finite(value, dim)) is_finite[t] = 0;
      }
    }
  }
}

}  // namespace batchinfer
