// Attention over the prefix tree with a carried softmax state.
//
// KV lies in groups of 16 tokens, [block][kv head][K groups, then V groups], each group
//   K [D / 2][16 tokens][2] bf16      V [8 token pairs][D][2] bf16
// All heads of a block lie together: own tokens are read head by head, in one stretch of memory.
// Two loops handle a tile of four groups:
//   lanes: many query heads over one tile. Queries lie in the lanes, keys are broadcast.
//   own:   one query token's heads of a KV group. Keys lie in the lanes.
// Both give the same bits for the same query and keys: scores are summed over channel pairs in order, outputs
// over token pairs in order, and the softmax sum goes through the same dot instruction with ones.
#pragma once
#include <omp.h>

#include <vector>

#include "plan.h"
#include "vec.h"

namespace batchinfer {

constexpr float MASKED = -1e30f;  // finite: exp2 of it minus any maximum is 0, minus itself is no NaN

struct Heads {
  int num_heads, num_kv_heads, dim;
  int per_group() const { return num_heads / num_kv_heads; }
};

// Softmax state of every query head, over the tiles met so far; written between the runs of different waves.
struct State {
  float* top;    // [tokens, heads]
  float* total;  // [tokens, heads]
  float* acc;    // [tokens, heads, dim]
};

struct Tile {
  const bf16 *k[4], *v[4];
};

struct KvLayer {
  const bf16* kv;
  int block_size, dim;
  // groups: see Plan::groups
  Tile tile(const int64_t* groups, int head) const {
    Tile out;
    const int64_t per_block = block_size / GROUP, half = (int64_t)block_size * dim;
    for (int i = 0; i < 4; i++) {
      out.k[i] = kv + (groups[i] + 2 * head * per_block) * GROUP * dim;
      out.v[i] = out.k[i] + half;
    }
    return out;
  }
};

struct Visible {  // of keys in the tile that begins at `begin`
  float begin;
  float window;  // 0: none
  bool cuts_high, cuts_low;
  int num_groups;  // groups behind the last visible key are left out: their weights would be 0
};

#if BI_AVX512
constexpr int UNROLL = 8;
#else
constexpr int UNROLL = 2;
#endif

// V vectors of 16 lanes; DIM is a constant or, when 0, `dim`.
template <int V, int DIM>
struct Lanes {
  alignas(64) bf16 q[(DIM ? DIM : 256) / 2 * V * 32];
  alignas(64) float acc[(DIM ? DIM : 256) * V * 16];
  alignas(64) float scores[TILE * V * 16];
  alignas(64) bf16 weights[TILE / 2 * V * 32];
  alignas(64) float top[V * 16], total[V * 16], position[V * 16];

  // Meanwhile `next`, the tile that this thread will need then, is fetched.
  __attribute__((noinline)) void meet(const Tile& tile, const Tile& next, const Visible& see, int dim_) {
    const int dim = DIM ? DIM : dim_;
    F16 max_[V], old[V], factor[V], sum[V], at[V];
    BI_UNROLL for (int v = 0; v < V; v++) max_[v] = old[v] = load(top + v * 16), at[v] = load(position + v * 16);
    for (int key = 0; key < see.num_groups * GROUP; key += UNROLL) {
      const bf16* k = tile.k[key / GROUP] + key % GROUP * 2;
      F16 s[UNROLL][V];
      BI_UNROLL for (int i = 0; i < UNROLL; i++) BI_UNROLL for (int v = 0; v < V; v++) s[i][v] = splat(0.f);
      const bf16* ahead = (key % GROUP < 8 ? next.k : next.v)[key / GROUP];
      const bool fetches = key % 8 == 0;
      for (int d = 0; d < dim / 2; d++) {
        P16 query[V];
        if (fetches) prefetch(ahead + d * 32);
        BI_UNROLL for (int v = 0; v < V; v++) query[v] = load_pairs(q + (d * V + v) * 32);
        BI_UNROLL for (int i = 0; i < UNROLL; i++) {
          P16 pair = splat_pair(k + d * GROUP * 2 + i * 2);
          BI_UNROLL for (int v = 0; v < V; v++) s[i][v] = dot2(s[i][v], query[v], pair);
        }
      }
      BI_UNROLL for (int i = 0; i < UNROLL; i++) BI_UNROLL for (int v = 0; v < V; v++) {
        F16 place = splat(see.begin + key + i);
        if (see.cuts_high) s[i][v] = where_greater(place, at[v], splat(MASKED), s[i][v]);
        if (see.cuts_low) s[i][v] = where_greater(add(place, splat(see.window - 0.5f)), at[v], s[i][v], splat(MASKED));
        store(scores + ((key + i) * V + v) * 16, s[i][v]);
        max_[v] = max(max_[v], s[i][v]);
      }
    }
    bool grew = false;
    BI_UNROLL for (int v = 0; v < V; v++) {
      store(top + v * 16, max_[v]);
      factor[v] = exp2(sub(old[v], max_[v]));
      grew |= any_differs(old[v], max_[v]);
      sum[v] = mul(load(total + v * 16), factor[v]);
    }
    for (int key = 0; key < see.num_groups * GROUP; key += 2) BI_UNROLL for (int v = 0; v < V; v++) {
      F16 low = exp2(sub(load(scores + (key * V + v) * 16), max_[v]));
      F16 high = exp2(sub(load(scores + ((key + 1) * V + v) * 16), max_[v]));
      P16 pairs = to_pairs(low, high);
      sum[v] = dot2(sum[v], pairs, ones());
      store_pairs(weights + (key / 2 * V + v) * 32, pairs);
    }
    BI_UNROLL for (int v = 0; v < V; v++) store(total + v * 16, sum[v]);
    for (int d = 0; d < dim; d += UNROLL) {
      F16 o[UNROLL][V];
      BI_UNROLL for (int i = 0; i < UNROLL; i++) BI_UNROLL for (int v = 0; v < V; v++) {
        o[i][v] = load(acc + ((d + i) * V + v) * 16);
        if (grew) o[i][v] = mul(o[i][v], factor[v]);
      }
      for (int g = 0; g < see.num_groups; g++)
        for (int pair = 0; pair < GROUP / 2; pair++) {
          P16 weight[V];
          BI_UNROLL for (int v = 0; v < V; v++) weight[v] = load_pairs(weights + ((g * 8 + pair) * V + v) * 32);
          BI_UNROLL for (int i = 0; i < UNROLL; i++) {
            P16 value = splat_pair(tile.v[g] + (pair * dim + d + i) * 2);
            BI_UNROLL for (int v = 0; v < V; v++) o[i][v] = dot2(o[i][v], weight[v], value);
          }
        }
      BI_UNROLL for (int i = 0; i < UNROLL; i++) BI_UNROLL for (int v = 0; v < V; v++)
        store(acc + ((d + i) * V + v) * 16, o[i][v]);
    }
  }
};

static int groups_seen(int first, int position) { return std::min(4, (position - first) / GROUP + 1); }

// Stores a query head's result.
BI_INLINE void store_result(const float* acc, F16 total, bf16* out, int dim) {
  for (int d = 0; d < dim; d += 16) store_narrow(out + d, div(load(acc + d), total));
}

// One run for up to V * 16 query heads, lanes [begin, begin + count) of the run's rows x heads of a KV group.
template <int V, int DIM>
static void run_lanes(const Plan& plan, const Run& run, const KvLayer& kv, const Heads& heads, int kv_head, int begin,
                      int count, const bf16* q, int window, State state, bf16* out, const Tile& after) {
  thread_local Lanes<V, DIM> lanes;
  const int dim = DIM ? DIM : heads.dim, per_group = heads.per_group(), width = V * 16;
  int64_t head_of[V * 16];
  int low = INT32_MAX, high = 0;
  for (int i = 0; i < width; i++) {
    int lane = begin + (i < count ? i : 0);
    int row = plan.rows[run.rows_begin + lane / per_group], position = plan.positions[row];
    head_of[i] = (int64_t)row * heads.num_heads + kv_head * per_group + lane % per_group;
    lanes.position[i] = (float)position;
    low = std::min(low, position), high = std::max(high, position);
    lanes.top[i] = run.wave ? state.top[head_of[i]] : MASKED;
    lanes.total[i] = run.wave ? state.total[head_of[i]] : 0.f;
  }
  for (int v = 0; v < V; v++) {
    const int64_t* head = head_of + v * 16;
    int d = 0;
    for (; d + 32 <= dim; d += 32) {
      F16 pairs[16];
      BI_UNROLL for (int i = 0; i < 16; i++) memcpy(&pairs[i], q + head[i] * dim + d, 64);
      transpose(pairs);
      BI_UNROLL for (int i = 0; i < 16; i++) memcpy(lanes.q + ((d / 2 + i) * width + v * 16) * 2, &pairs[i], 64);
    }
    for (; d < dim; d += 2)
      for (int i = 0; i < 16; i++) memcpy(lanes.q + (d / 2 * width + v * 16 + i) * 2, q + head[i] * dim + d, 4);
    if (run.wave == 0) continue;
    for (d = 0; d < dim; d += 16) {
      F16 x[16];
      BI_UNROLL for (int i = 0; i < 16; i++) x[i] = load(state.acc + head[i] * dim + d);
      transpose(x);
      BI_UNROLL for (int i = 0; i < 16; i++) store(lanes.acc + (d + i) * width + v * 16, x[i]);
    }
  }
  if (run.wave == 0) memset(lanes.acc, 0, sizeof(float) * dim * width);
  const int64_t* groups = &plan.groups[(size_t)run.tiles_begin * 4];
  Tile next = kv.tile(groups, kv_head);
  for (int t = 0; t < run.num_tiles; t++) {
    const Tile tile = next;
    next = t + 1 < run.num_tiles ? kv.tile(groups + (t + 1) * 4, kv_head) : after;
    const int first = (run.first_tile + t) * TILE;
    Visible see{(float)first, (float)window, first + TILE - 1 > low, window > 0 && first <= high - window,
                groups_seen(first, high)};
    lanes.meet(tile, next, see, dim);
  }
  const int num_final = std::min(count, run.num_final * per_group - begin);  // lanes that have their result
  for (int v = 0; v < V; v++) {
    const int64_t* head = head_of + v * 16;
    const int lanes_here = std::min(16, count - v * 16), final_here = num_final - v * 16;
    for (int d = 0; d < dim; d += 16) {
      F16 x[16];
      BI_UNROLL for (int i = 0; i < 16; i++) x[i] = load(lanes.acc + (d + i) * width + v * 16);
      transpose(x);
      for (int i = 0; i < lanes_here; i++) {
        if (i < final_here) store_narrow(out + head[i] * dim + d, div(x[i], splat(lanes.total[v * 16 + i])));
        else store(state.acc + head[i] * dim + d, x[i]);
      }
    }
    for (int i = std::max(final_here, 0); i < lanes_here; i++) {
      state.top[head[i]] = lanes.top[v * 16 + i];
      state.total[head[i]] = lanes.total[v * 16 + i];
    }
  }
}

// One tile for G query heads of one token, which share a KV head: q [G, dim], state of head 0. Meanwhile `next`,
// the tile that this thread will need then, is fetched.
template <int G, int DIM, int GROUPS>
static __attribute__((noinline)) void meet_own(const Tile& tile, const Tile& next, const bf16* q, int first,
                                               int position, int window, State state, int dim_) {
  const int dim = DIM ? DIM : dim_;
  F16 s[G][GROUPS], sum[G];
  BI_UNROLL for (int g = 0; g < G; g++) BI_UNROLL for (int j = 0; j < GROUPS; j++) s[g][j] = splat(0.f);
  for (int d = 0; d < dim / 2; d++) {
    P16 key[GROUPS];
    BI_UNROLL for (int j = 0; j < GROUPS; j++) key[j] = load_pairs(tile.k[j] + d * 32);
    BI_UNROLL for (int j = 0; j < 4; j++) prefetch(next.k[j] + d * 32);
    BI_UNROLL for (int g = 0; g < G; g++) {
      P16 pair = splat_pair(q + g * dim + 2 * d);
      BI_UNROLL for (int j = 0; j < GROUPS; j++) s[g][j] = dot2(s[g][j], key[j], pair);
    }
  }
  if (first + TILE - 1 > position || (window > 0 && first <= position - window)) {
    alignas(64) float iota[16];
    for (int i = 0; i < 16; i++) iota[i] = (float)i;
    BI_UNROLL for (int j = 0; j < GROUPS; j++) {
      F16 place = add(load(iota), splat((float)(first + j * 16))), at = splat((float)position);
      BI_UNROLL for (int g = 0; g < G; g++) {
        s[g][j] = where_greater(place, at, splat(MASKED), s[g][j]);
        if (window > 0)
          s[g][j] = where_greater(add(place, splat((float)window - 0.5f)), at, s[g][j], splat(MASKED));
      }
    }
  }
  alignas(64) bf16 weights[G][TILE];
  BI_UNROLL for (int g = 0; g < G; g++) {
    F16 highest = s[g][0];
    BI_UNROLL for (int j = 1; j < GROUPS; j++) highest = max(highest, s[g][j]);
    const float high = reduce_max(highest);
    float* top = state.top + g;
    sum[g] = splat(state.total[g]);
    if (high > *top) {
      F16 factor = exp2(sub(splat(*top), splat(high)));
      *top = high;
      sum[g] = mul(sum[g], factor);
      float* acc = state.acc + g * dim;
      for (int d = 0; d < dim; d += 16) store(acc + d, mul(load(acc + d), factor));
    }
    BI_UNROLL for (int j = 0; j < GROUPS; j++)
      store_narrow(weights[g] + j * 16, exp2(sub(s[g][j], splat(*top))));
  }
  auto weigh = [&](auto count, int part) {
    constexpr int C = decltype(count)::value;
    F16 o[G][C];
    BI_UNROLL for (int g = 0; g < G; g++) BI_UNROLL for (int j = 0; j < C; j++)
      o[g][j] = load(state.acc + g * dim + part + j * 16);
    for (int group = 0; group < GROUPS; group++)
      for (int pair = 0; pair < GROUP / 2; pair++) {
        const int64_t at = (pair * dim + part) * 2;
        P16 value[C];
        BI_UNROLL for (int j = 0; j < C; j++) value[j] = load_pairs(tile.v[group] + at + j * 32);
        BI_UNROLL for (int j = 0; j < C; j++) prefetch(next.v[group] + at + j * 32);
        BI_UNROLL for (int g = 0; g < G; g++) {
          P16 weight = splat_pair(&weights[g][group * GROUP + 2 * pair]);
          if (part == 0) sum[g] = dot2(sum[g], weight, ones());
          BI_UNROLL for (int j = 0; j < C; j++) o[g][j] = dot2(o[g][j], weight, value[j]);
        }
      }
    BI_UNROLL for (int g = 0; g < G; g++) BI_UNROLL for (int j = 0; j < C; j++)
      store(state.acc + g * dim + part + j * 16, o[g][j]);
  };
  int part = 0;
  for (; part + 64 <= dim; part += 64) weigh(std::integral_constant<int, 4>{}, part);
  if constexpr (DIM == 0)
    for (; part < dim; part += 16) weigh(std::integral_constant<int, 1>{}, part);
  BI_UNROLL for (int g = 0; g < G; g++) state.total[g] = first_lane(sum[g]);
}

template <int G, int DIM>
static void meet_own(const Tile& tile, const Tile& next, const bf16* q, int first, int position, int window,
                     State state, int dim) {
  const int groups = groups_seen(first, position);
  if (groups == 1) meet_own<G, DIM, 1>(tile, next, q, first, position, window, state, dim);
  else if (groups == 2) meet_own<G, DIM, 2>(tile, next, q, first, position, window, state, dim);
  else meet_own<G, DIM, 4>(tile, next, q, first, position, window, state, dim);
}

// One run for one token, number `member` of the run, and KV heads [kv_begin, kv_end), tile by tile.
template <int DIM>
static void run_token(const Plan& plan, const Run& run, const KvLayer& kv, const Heads& heads, int kv_begin,
                      int kv_end, int member, const bf16* q, int window, State state, bf16* out, const Tile& after) {
  const int row = plan.rows[run.rows_begin + member];
  const int dim = DIM ? DIM : heads.dim, per_group = heads.per_group(), position = plan.positions[row];
  const int64_t begin = (int64_t)row * heads.num_heads + kv_begin * per_group;
  const int64_t num_heads = (kv_end - kv_begin) * per_group;
  if (run.wave == 0) {
    memset(state.acc + begin * dim, 0, sizeof(float) * num_heads * dim);
    for (int64_t i = begin; i < begin + num_heads; i++) state.top[i] = MASKED, state.total[i] = 0.f;
  }
  const int64_t* groups = &plan.groups[(size_t)run.tiles_begin * 4];
  Tile next = kv.tile(groups, kv_begin);
  for (int t = 0; t < run.num_tiles; t++) {
    for (int h = kv_begin; h < kv_end; h++) {
      const Tile tile = next;
      next = h + 1 < kv_end ? kv.tile(groups + t * 4, h + 1)
             : t + 1 < run.num_tiles ? kv.tile(groups + (t + 1) * 4, kv_begin) : after;
      const int first = (run.first_tile + t) * TILE;
      int64_t head = (int64_t)row * heads.num_heads + h * per_group;
      for (int left = per_group; left > 0;) {
        auto go = [&](auto count) {
          constexpr int G = decltype(count)::value;
          meet_own<G, DIM>(tile, next, q + head * dim, first, position, window,
                           {state.top + head, state.total + head, state.acc + head * dim}, heads.dim);
          head += G;
          left -= G;
        };
        if (left >= 4) go(std::integral_constant<int, 4>{});
        else if (left == 3) go(std::integral_constant<int, 3>{});
        else if (left == 2) go(std::integral_constant<int, 2>{});
        else go(std::integral_constant<int, 1>{});
      }
    }
  }
  if (member >= run.num_final) return;
  for (int64_t i = begin; i < begin + num_heads; i++)
    store_result(state.acc + i * dim, splat(state.total[i]), out + i * dim, dim);
}

constexpr int MANY_LANES = 24;  // from here on a unit's tokens are handled by themselves, without carrying state
constexpr int FEW_LANES = 8;  // up to here each token is handled by itself

// A piece of a run that one thread does at a time: KV heads [kv_begin, kv_end) of token `begin` of the run, or,
// with a count, that many lanes of the run's tokens x heads of one KV head.
struct Piece {
  int run, kv_begin, kv_end, begin, count;
};

// Pieces of a wave; neighbours [starts[i], starts[i + 1]) go to one thread, which fetches the next one's first tile.
struct Pieces {
  std::vector<Piece> all;
  std::vector<int> starts;
};

static void cut_pieces(const Plan& plan, const Heads& heads, int first_run, int last_run, Pieces& out) {
  out.all.clear(), out.starts.clear();
  int num_tokens = 0;
  for (int r = first_run; r < last_run; r++) num_tokens += plan.runs[r].num_rows;
  // A token's heads stay together, unless there are too few tokens to keep all threads busy.
  const int heads_at_a_time = num_tokens < 8 * omp_get_max_threads() ? 1 : heads.num_kv_heads;
  std::vector<int64_t> cost;  // about, in tiles for 16 lanes
  for (int r = first_run; r < last_run; r++) {
    const Run& run = plan.runs[r];
    const int lanes = run.num_rows * heads.per_group();
    if (run.num_rows == 1 || lanes <= FEW_LANES) {
      for (int i = 0; i < run.num_rows; i++)
        for (int h = 0; h < heads.num_kv_heads; h += heads_at_a_time) {
          out.all.push_back({r, h, std::min(h + heads_at_a_time, heads.num_kv_heads), i, 0});
          cost.push_back(run.num_tiles * heads_at_a_time);
        }
    } else {
      for (int h = 0; h < heads.num_kv_heads; h++)
        for (int i = 0; i < lanes; i += 32) {
          out.all.push_back({r, h, h + 1, i, std::min(32, lanes - i)});
          cost.push_back(run.num_tiles * (lanes - i > 16 ? 2 : 1) + 1);
        }
    }
  }
  int64_t all = 0, sum = 0;
  for (int64_t one : cost) all += one;
  const int64_t share = all / (omp_get_max_threads() * 24) + 1;
  for (size_t p = 0; p < out.all.size(); sum += cost[p], p++)
    if (out.starts.empty() || sum >= share) out.starts.push_back((int)p), sum = 0;
  out.starts.push_back((int)out.all.size());
}

template <int DIM>
static void attend(const Plan& plan, const KvLayer& kv, const Heads& heads, const bf16* q, int window, State state,
                   bf16* out) {
  Pieces pieces;
  for (int wave = 0, begin = 0; wave < plan.num_waves; wave++) {
    int end = begin;
    while (end < (int)plan.runs.size() && plan.runs[end].wave == wave) end++;
    cut_pieces(plan, heads, begin, end, pieces);
    begin = end;
#pragma omp parallel for schedule(dynamic, 1)
    for (int s = 0; s < (int)pieces.starts.size() - 1; s++) {
      for (int p = pieces.starts[s]; p < pieces.starts[s + 1]; p++) {
        const Piece &piece = pieces.all[p], &following = pieces.all[std::min(p + 1, pieces.starts[s + 1] - 1)];
        const Run& run = plan.runs[piece.run];
        const Tile after = kv.tile(&plan.groups[(size_t)plan.runs[following.run].tiles_begin * 4], following.kv_begin);
        if (piece.count == 0)
          run_token<DIM>(plan, run, kv, heads, piece.kv_begin, piece.kv_end, piece.begin, q, window, state, out, after);
        else if (piece.count > 16)
          run_lanes<2, DIM>(plan, run, kv, heads, piece.kv_begin, piece.begin, piece.count, q, window, state, out, after);
        else
          run_lanes<1, DIM>(plan, run, kv, heads, piece.kv_begin, piece.begin, piece.count, q, window, state, out, after);
      }
    }
  }
}

// q [tokens, heads, dim] rotated and scaled by scale * log2(e); out [tokens, heads * dim]. dim: a multiple of 16 to 256.
static void tree_attention(const Plan& plan, const KvLayer& kv, const Heads& heads, const bf16* q, int window,
                           State state, bf16* out) {
#if !BI_PORTABLE  // there it only takes the compiler minutes
  if (heads.dim == 64) return attend<64>(plan, kv, heads, q, window, state, out);
  if (heads.dim == 128) return attend<128>(plan, kv, heads, q, window, state, out);
#endif
  attend<0>(plan, kv, heads, q, window, state, out);
}

}  // namespace batchinfer
