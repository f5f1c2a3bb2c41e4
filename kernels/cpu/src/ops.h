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
  alignas(64) bf16 rounded[16];
  for (int i = 0; i < n; i += 16) {
    store_narrow(rounded, mul(load_widen(x + i), scale));
    store_narrow(out + i, mul(load_widen(rounded), load_widen(weight + i)));
  }
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
    alignas(64) bf16 rounded[16];
    for (int i = 0; i < n; i += 16) {
      F16 x = load_widen(gate + i);
      // exp(-x) is kept finite: 2^126 already makes the quotient 0.
      F16 power = mul(x, splat(-LOG2E));
      power = where_greater(power, splat(126.f), splat(126.f), power);
      store_narrow(rounded, div(x, add(splat(1.f), exp2(power))));
      store_narrow(out + (int64_t)r * n + i, mul(load_widen(rounded), load_widen(up + i)));
    }
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
  for (int i = 0; i < half; i++) {
    float first = x[i], second = x[i + half];
    x[i] = first * cos[i] - second * sin[i];
    x[i + half] = second * cos[i] + first * sin[i];
  }
}

// qkv [tokens, (heads + 2 kv heads) * dim] -> q [tokens, heads, dim] rotated and scaled, k and v into the cache.
// q_norm, k_norm: [dim] or null. slots: block * block_size + place of each token.
static void rope_and_store_kv(const bf16* qkv, const bf16* q_norm, const bf16* k_norm, float eps,
                              const RopeTables& rope, const int32_t* positions, const int64_t* slots, int tokens,
                              const Heads& heads, float scale, int block_size, bf16* q, bf16* kv_cache) {
  const int dim = heads.dim, width = heads.num_heads + 2 * heads.num_kv_heads;
#pragma omp parallel for schedule(static)
  for (int t = 0; t < tokens; t++) {
    const bf16* row = qkv + (int64_t)t * width * dim;
    alignas(64) float x[256];
    alignas(64) bf16 normed[256];
    auto read = [&](const bf16* from, const bf16* norm) {
      if (norm) norm_row(from, norm, eps, normed, dim), from = normed;
      for (int d = 0; d < dim; d += 16) store(x + d, load_widen(from + d));
      rotate(x, rope, positions[t]);
    };
    for (int h = 0; h < heads.num_heads; h++) {
      read(row + h * dim, q_norm);
      bf16* out = q + ((int64_t)t * heads.num_heads + h) * dim;
      for (int d = 0; d < dim; d += 16) store_narrow(out + d, mul(load(x + d), splat(scale)));
    }
    const int64_t block = slots[t] / block_size, group = slots[t] % block_size / GROUP;
    const int token = slots[t] % GROUP;
    for (int h = 0; h < heads.num_kv_heads; h++) {
      bf16* k = kv_cache + (block * heads.num_kv_heads + h) * 2 * block_size * dim + group * GROUP * dim;
      bf16* v = k + (int64_t)block_size * dim;
      read(row + (heads.num_heads + h) * dim, k_norm);
      for (int d = 0; d < dim; d++) k[(d / 2 * GROUP + token) * 2 + d % 2] = narrow(x[d]);
      const bf16* value = row + (heads.num_heads + heads.num_kv_heads + h) * dim;
      for (int d = 0; d < dim; d++) v[(token / 2 * dim + d) * 2 + token % 2] = value[d];
    }
  }
}

}  // namespace batchinfer
