// bf16 matrix products with fp32 accumulation over packed weights.
//
// Packed weight of [N, K]: [N / 16][K / 2][16 outputs][2] bf16, N rounded up to 16 with zeros, K even.
// Outputs lie in the lanes; every output is summed over channel pairs in order, in one accumulator. So a
// row's bits do not depend on the number of rows, on its place, or on how the work is split.
#pragma once
#include <algorithm>

#include "vec.h"

namespace batchinfer {

#if BI_AVX512
constexpr int ROWS = 8, COLS = 3;  // 24 accumulators + 3 weights + 1 broadcast of 32 registers
#elif BI_AVX2
constexpr int ROWS = 4, COLS = 1;  // 8 accumulators of 16 registers
#else
constexpr int ROWS = 2, COLS = 1;
#endif
constexpr int ROW_CHUNK = 256;  // rows that stay in the second-level cache beside a panel

template <int R, int C>
BI_INLINE void accumulate(const bf16* x, int64_t x_stride, const bf16* w, int K, F16 (&acc)[R][C]) {
  BI_UNROLL for (int r = 0; r < R; r++) BI_UNROLL for (int c = 0; c < C; c++) acc[r][c] = splat(0.f);
  for (int k = 0; k < K; k += 2) {
    P16 weight[C];
    BI_UNROLL for (int c = 0; c < C; c++) weight[c] = load_pairs(w + ((int64_t)c * K + k) * 16);
    BI_UNROLL for (int r = 0; r < R; r++) {
      P16 value = splat_pair(x + r * x_stride + k);
      BI_UNROLL for (int c = 0; c < C; c++) acc[r][c] = dot2(acc[r][c], weight[c], value);
    }
  }
}

// One tile of R rows x C * 16 outputs, handed to `sink(row, column, vectors [R][C])`.
template <int R, int C, class Sink>
static __attribute__((noinline)) void tile(const bf16* x, int64_t x_stride, const bf16* w, int K, int row, int column,
                                           const Sink& sink) {
  F16 acc[R][C];
  accumulate<R, C>(x + row * x_stride, x_stride, w + (int64_t)column * K, K, acc);
  sink(row, column, acc);
}

template <int R, int C, class Sink>
static void rows_of(const bf16* x, int64_t x_stride, const bf16* w, int K, int begin, int end, int column,
                    const Sink& sink) {
  int row = begin;
  for (; row + R <= end; row += R) tile<R, C>(x, x_stride, w, K, row, column, sink);
  if constexpr (R > 1) {
    if (row < end) rows_of<R / 2, C>(x, x_stride, w, K, row, end, column, sink);
  }
}

// Rows [begin, end) x `vectors` * 16 outputs from `column` on.
template <int C, class Sink>
static void panel(const bf16* x, int64_t x_stride, const bf16* w, int K, int begin, int end, int column, int vectors,
                  const Sink& sink) {
  if (vectors >= C) return rows_of<ROWS, C>(x, x_stride, w, K, begin, end, column, sink);
  if constexpr (C > 1) panel<C - 1>(x, x_stride, w, K, begin, end, column, vectors, sink);
}

// x [M, K] times packed w: every tile of outputs is handed to `sink` once, from any thread.
template <class Sink>
static void matmul(const bf16* x, int64_t x_stride, const bf16* w, int M, int N, int K, const Sink& sink) {
  const int vectors = (N + 15) / 16, panels = (vectors + COLS - 1) / COLS, chunks = (M + ROW_CHUNK - 1) / ROW_CHUNK;
  // Dynamic: when a neighbour takes part of a core, the other threads take over its share.
#pragma omp parallel for schedule(dynamic, 1)
  for (int item = 0; item < panels * chunks; item++) {
    int chunk = item / panels, column = item % panels * COLS;
    panel<COLS>(x, x_stride, w, K, chunk * ROW_CHUNK, std::min(M, (chunk + 1) * ROW_CHUNK), column * 16,
                std::min(COLS, vectors - column), sink);
  }
}

struct StoreNarrow {
  const bf16* bias;  // [N] or null
  bf16* out;         // [M, N]
  int N;

  template <int R, int C>
  __attribute__((always_inline)) void operator()(int row, int column, F16 (&acc)[R][C]) const {
    BI_UNROLL for (int c = 0; c < C; c++) {
      const int at = column + c * 16;
      if (at + 16 <= N) {
        BI_UNROLL for (int r = 0; r < R; r++) {
          F16 value = bias ? add(acc[r][c], load_widen(bias + at)) : acc[r][c];
          store_narrow(out + (int64_t)(row + r) * N + at, value);
        }
      } else {
        for (int r = 0; r < R; r++) {
          float lanes[16];
          store(lanes, acc[r][c]);
          for (int i = 0; at + i < N; i++)
            out[(int64_t)(row + r) * N + at + i] = narrow(lanes[i] + (bias ? widen(bias[at + i]) : 0.f));
        }
      }
    }
  }
};

// out [M, N] bf16 = x w^T + bias; bias [N] bf16 or null.
static void linear(const bf16* x, const bf16* w, const bf16* bias, bf16* out, int M, int N, int K) {
  matmul(x, K, w, M, N, K, StoreNarrow{bias, out, N});
}

static void pack(const bf16* w, bf16* out, int N, int K) {
#pragma omp parallel for schedule(static)
  for (int block = 0; block < (N + 15) / 16; block++)
    for (int k = 0; k < K; k += 2)
      for (int i = 0; i < 16; i++) {
        int n = block * 16 + i;
        bf16* to = out + ((int64_t)block * K + k) * 16 + i * 2;
        to[0] = n < N ? w[(int64_t)n * K + k] : 0;
        to[1] = n < N ? w[(int64_t)n * K + k + 1] : 0;
      }
}

}  // namespace batchinfer
