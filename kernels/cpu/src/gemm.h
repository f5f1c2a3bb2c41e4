// bf16 matrix products with fp32 accumulation over packed weights.
//
// Packed weight of [N, K]: [N / 16][K / 2][16 outputs][2] bf16, N rounded up to 16 with zeros, K even.
// Outputs lie in the lanes; every output is summed over channel pairs in order, in one accumulator. So a
// row's bits do not depend on the number of rows, on its place, or on how the work is split.
#pragma once
#include <omp.h>

#include <algorithm>
#include <vector>

#include "vec.h"

namespace batchinfer {

// A tile: so many rows for so many vectors of 16 outputs.
#if BI_AVX512
// 6 x 4: 24 accumulators, 4 weights and a broadcast of 32 registers. 8 x 3 is as fast on one thread, but then two
// threads write to one cache line where their panels meet.
constexpr int COLS = 4;
constexpr int rows_for(int cols) { return cols >= 3 ? 24 / cols : 12; }
constexpr int PAIR_COLS = 4;
#elif BI_AVX2
constexpr int COLS = 1;  // 4 x 1: 8 accumulators of 16 registers
constexpr int rows_for(int cols) { return cols == 1 ? 4 : 2; }
constexpr int PAIR_COLS = 2;
#else
constexpr int COLS = 1;
constexpr int rows_for(int) { return 2; }
constexpr int PAIR_COLS = 2;
#endif
constexpr int ROW_CHUNK = 256;     // rows that stay in the second-level cache beside a panel
constexpr int MIN_ROW_CHUNK = 24;  // fewer rows do not pay for reading a panel

// Memory that is wanted soon. A little of it is fetched with every pair of channels: not so much at once that loads wait.
struct Ahead {
  const char* at = nullptr;
  const char* end = nullptr;
  int64_t step = 0;  // bytes for a pair of channels, in sixteenths

  Ahead() = default;
  Ahead(const bf16* first, int64_t count) : at((const char*)first), end((const char*)(first + count)) {}
  // The part of tile number `tile` of `num_tiles`, each of `pairs` pairs of channels.
  Ahead part(int tile, int num_tiles, int pairs) const {
    Ahead out;
    const int64_t bytes = end - at;
    out.at = at + bytes * tile / num_tiles;
    out.step = bytes * 16 / num_tiles / pairs;
    return out;
  }
  void fetch(int pair) const { prefetch(at + (pair * step >> 4)); }
};

template <int R, int C>
BI_INLINE void accumulate(const bf16* x, int64_t x_stride, const bf16* w, int K, const Ahead& ahead, F16 (&acc)[R][C]) {
  BI_UNROLL for (int r = 0; r < R; r++) BI_UNROLL for (int c = 0; c < C; c++) acc[r][c] = splat(0.f);
  for (int k = 0; k < K; k += 2) {
    P16 weight[C];
    ahead.fetch(k / 2);
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
                                           const Sink& sink, const Ahead& ahead) {
  F16 acc[R][C];
  accumulate<R, C>(x + row * x_stride, x_stride, w + (int64_t)column * K, K, ahead, acc);
  sink(row, column, acc);
}

template <int R, int C, class Sink>
BI_INLINE void tile_of(int rows, const bf16* x, int64_t x_stride, const bf16* w, int K, int row, int column,
                       const Sink& sink, const Ahead& ahead) {
  if (rows == R) return tile<R, C>(x, x_stride, w, K, row, column, sink, ahead);
  if constexpr (R > 1) tile_of<R - 1, C>(rows, x, x_stride, w, K, row, column, sink, ahead);
}

// Rows [begin, end), in as few tiles as there can be, of nearly equal height.
template <int C, class Sink>
static void rows_of(const bf16* x, int64_t x_stride, const bf16* w, int K, int begin, int end, int column,
                    const Sink& sink, Ahead ahead) {
  constexpr int R = rows_for(C);
  const int num_tiles = (end - begin + R - 1) / R;
  // With few rows the panel itself is read as fast as memory gives it.
  if (num_tiles < 4 || !ahead.at) ahead = Ahead(x, 0);
  for (int row = begin, left = num_tiles; left > 0; left--) {
    const int rows = (end - row + left - 1) / left;
    tile_of<R, C>(rows, x, x_stride, w, K, row, column, sink, ahead.part(num_tiles - left, num_tiles, K / 2));
    row += rows;
  }
}

// Rows [begin, end) x `vectors` * 16 outputs from `column` on; STEP: vectors that stay together.
template <int C, int STEP, class Sink>
static void panel(const bf16* x, int64_t x_stride, const bf16* w, int K, int begin, int end, int column, int vectors,
                  const Sink& sink, Ahead ahead = {}) {
  if (vectors >= C) return rows_of<C>(x, x_stride, w, K, begin, end, column, sink, ahead);
  if constexpr (C > STEP) panel<C - STEP, STEP>(x, x_stride, w, K, begin, end, column, vectors, sink, ahead);
}

template <int C>
BI_INLINE Ahead panel_of(const bf16* w, int first, int vectors, int K) {
  return {w + (int64_t)first * 16 * K, (int64_t)std::min(C, vectors - first) * 16 * K};
}

// Into how many chunks to cut M rows: few, but so that all threads end at about the same time.
static int num_row_chunks(int M, int panels, int threads) {
  const int fewest = (M + ROW_CHUNK - 1) / ROW_CHUNK, most = std::max(fewest, M / MIN_ROW_CHUNK);
  int best = fewest;
  double best_waste = 1e9;
  for (int chunks = fewest; chunks <= most && best_waste > 1.01; chunks++) {
    const int items = panels * chunks;
    const double waste = (double)((items + threads - 1) / threads * threads) / items;
    if (waste < best_waste - 1e-9) best = chunks, best_waste = waste;
  }
  return best;
}

#if BI_AVX512
// More rows than a tile of four vectors has, but so few that the weights are what takes time: all rows stand over one
// vector of outputs after the other, and each weight is read once.
constexpr int MIN_TALL = rows_for(COLS) + 1, MAX_TALL = 20;
constexpr int TALL_COLS = 2;  // a cache line of results; panels of more would leave a thread idle at the end

// x: [K / 2][R][2], see matmul_tall. Meanwhile the next vector is fetched, of the last one `then`.
template <int R, class Sink>
static __attribute__((noinline)) void tall_tile(const bf16* x, const bf16* w, const bf16* then, int K, int column,
                                                const Sink& sink) {
  F16 all[R][TALL_COLS];
  for (int c = 0; c < TALL_COLS; c++, w += (int64_t)16 * K) {
    const bf16* const next = c + 1 < TALL_COLS ? w + (int64_t)16 * K : then;
    F16 acc[R];
    BI_UNROLL for (int r = 0; r < R; r++) acc[r] = splat(0.f);
    for (int k = 0; k < K; k += 2) {
      const P16 weight = load_pairs(w + (int64_t)k * 16);
      prefetch(next + (int64_t)k * 16);
      BI_UNROLL for (int r = 0; r < R; r++) acc[r] = dot2(acc[r], weight, splat_pair(x + ((int64_t)k / 2 * R + r) * 2));
    }
    BI_UNROLL for (int r = 0; r < R; r++) all[r][c] = acc[r];
  }
  sink(0, column, all);
}

template <int R, int STEP, class Sink>
static void matmul_tall(const bf16* x, int64_t x_stride, const bf16* w, int N, int K, const Sink& sink) {
  constexpr int C = TALL_COLS;
  const int vectors = (N + 15) / 16, threads = omp_get_max_threads();
  thread_local std::vector<bf16> scratch;
  scratch.resize((size_t)R * K);
  bf16* const turned = scratch.data();  // a pair of channels of all rows lies together
  for (int r = 0; r < R; r++)
    for (int k = 0; k < K; k += 2) memcpy(turned + ((int64_t)k / 2 * R + r) * 2, x + r * x_stride + k, 4);
#pragma omp parallel for schedule(dynamic, 1)
  for (int column = 0; column < vectors; column += C) {
    const int next = column + C * threads < vectors ? column + C * threads : column;
    const bf16* const here = w + (int64_t)column * 16 * K;
    if (vectors - column >= C) tall_tile<R>(turned, here, w + (int64_t)next * 16 * K, K, column * 16, sink);
    else panel<C, STEP>(x, x_stride, w, K, 0, R, column * 16, vectors - column, sink);
  }
}

template <int R, int STEP, class Sink>
static void matmul_tall_of(int rows, const bf16* x, int64_t x_stride, const bf16* w, int N, int K, const Sink& sink) {
  if (rows == R) return matmul_tall<R, STEP>(x, x_stride, w, N, K, sink);
  if constexpr (R > MIN_TALL) matmul_tall_of<R - 1, STEP>(rows, x, x_stride, w, N, K, sink);
}
#endif

// x [M, K] times packed w: every tile of outputs is handed to `sink` once, from any thread.
template <int C, int STEP, class Sink>
static void matmul(const bf16* x, int64_t x_stride, const bf16* w, int M, int N, int K, const Sink& sink) {
#if BI_AVX512
  if (M >= MIN_TALL && M <= MAX_TALL) return matmul_tall_of<MAX_TALL, STEP>(M, x, x_stride, w, N, K, sink);
#endif
  const int vectors = (N + 15) / 16, panels = (vectors + C - 1) / C, threads = omp_get_max_threads();
  const int chunks = num_row_chunks(M, panels, threads);
  // Chunks that are worked on together, panel after panel: a thread's rows stay in its cache, a panel is read
  // from memory once.
  const int together = std::max(1, std::min(chunks, threads));
  // Dynamic: when a neighbour takes part of a core, the other threads take over its share.
#pragma omp parallel for schedule(dynamic, 1)
  for (int item = 0; item < panels * chunks; item++) {
    const int group = item / (panels * together), within = item % (panels * together);
    const int wide = std::min(together, chunks - group * together), column = within / wide * C;
    const int chunk = group * together + within % wide, next = (within + threads) / wide * C;
    Ahead ahead;
    if (next < vectors && next != column) ahead = panel_of<C>(w, next, vectors, K);
    panel<C, STEP>(x, x_stride, w, K, (int)((int64_t)M * chunk / chunks), (int)((int64_t)M * (chunk + 1) / chunks),
                   column * 16, std::min(C, vectors - column), sink, ahead);
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

// residual [M, N] += x w^T + bias, N a multiple of 16. The product is rounded to bf16 before it is added, as if
// it had been stored.
struct AddNarrow {
  const bf16* bias;
  bf16* residual;
  int N;

  template <int R, int C>
  __attribute__((always_inline)) void operator()(int row, int column, F16 (&acc)[R][C]) const {
    BI_UNROLL for (int c = 0; c < C; c++) {
      const int at = column + c * 16;
      BI_UNROLL for (int r = 0; r < R; r++) {
        bf16* sum = residual + (int64_t)(row + r) * N + at;
        F16 value = bias ? add(acc[r][c], load_widen(bias + at)) : acc[r][c];
        store_narrow(sum, add(load_widen(sum), rounded(value)));
      }
    }
  }
};

// out [M, N / 2] = silu(gate) * up; the outputs of w are 16 of the gate, then 16 of up, and so on. Both and silu's
// result are rounded to bf16, as if they had been stored.
struct GateUp {
  const bf16* bias;  // in the order of w, or null
  bf16* out;
  int N;

  template <int R, int C>
  __attribute__((always_inline)) void operator()(int row, int column, F16 (&acc)[R][C]) const {
    BI_UNROLL for (int c = 0; c + 1 < C; c += 2) {
      const int at = column + c * 16;
      for (int r = 0; r < R; r++) {
        F16 gate = acc[r][c], up = acc[r][c + 1];
        if (bias) gate = add(gate, load_widen(bias + at)), up = add(up, load_widen(bias + at + 16));
        store_narrow(out + (int64_t)(row + r) * (N / 2) + at / 2, mul(rounded(silu(rounded(gate))), rounded(up)));
      }
    }
  }
};

// out [M, N] bf16 = x w^T + bias; bias [N] bf16 or null.
static void linear(const bf16* x, const bf16* w, const bf16* bias, bf16* out, int M, int N, int K) {
  matmul<COLS, 1>(x, K, w, M, N, K, StoreNarrow{bias, out, N});
}
static void linear_add(const bf16* x, const bf16* w, const bf16* bias, bf16* residual, int M, int N, int K) {
  matmul<COLS, 1>(x, K, w, M, N, K, AddNarrow{bias, residual, N});
}
static void gate_up_silu(const bf16* x, const bf16* w, const bf16* bias, bf16* out, int M, int N, int K) {
  matmul<PAIR_COLS, 2>(x, K, w, M, N, K, GateUp{bias, out, N});
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
