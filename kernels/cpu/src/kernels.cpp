// The C interface, and a decoder's forward pass made of the kernels. Built once per instruction set.
#include <omp.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "attention.h"
#include "binding.h"
#include "gemm.h"
#include "head.h"
#include "ops.h"
#include "plan.h"
#include "sample.h"

using namespace batchinfer;

// Scratch memory that keeps its size between uses: fresh pages would be cleared by the system at every step.
template <class T>
class Scratch {
 public:
  T* at_least(size_t count) {
    if (count > count_) {
      std::free(data_);
      data_ = nullptr, count_ = 0;  // a failure below leaves it empty
      const size_t bytes = (count * sizeof(T) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
      data_ = static_cast<T*>(std::aligned_alloc(HUGE_PAGE, bytes));
      if (!data_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
      madvise(data_, bytes, MADV_HUGEPAGE);  // rows of a matrix lie on many small pages
#endif
      count_ = bytes / sizeof(T);
    }
    return data_;
  }
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

 private:
  static constexpr size_t HUGE_PAGE = 1 << 21;
  T* data_ = nullptr;
  size_t count_ = 0;
};

// Seconds of each part since they were last read; see bi_times.
enum Part { PRODUCTS, ATTENTION, HEAD, ROPE_AND_KV, NORMS, SAMPLING, PLANNING, NUM_PARTS };
static double part_seconds[NUM_PARTS];

template <class Work>
static void timed(Part part, const Work& work) {
  const double began = omp_get_wtime();
  work();
  part_seconds[part] += omp_get_wtime() - began;
}

extern "C" {

struct bi_layer {
  const bf16 *attn_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias, *mlp_norm, *gate_up, *gate_up_bias, *down,
      *down_bias;
  int32_t window;  // 0: none
};

struct bi_model {
  int32_t num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim, rope_dim;
  float eps, scale;
  const bf16 *embed, *final_norm;
  const float *cos, *sin;  // [positions, rope_dim / 2]
  const bi_layer* layers;
};

struct bi_batch {
  int32_t num_tokens, num_seqs, block_size;
  int64_t max_blocks;
  const int64_t *token_ids, *slots;  // [num_tokens]
  const int32_t *block_tables, *query_starts, *query_lens;
  bf16* kv_cache;        // [layers, blocks, kv heads, K and V, block_size * head_dim], see attention.h
  int64_t layer_stride;  // elements
};

static int rows_alone(const bi_model& m) {
  const int per_group = m.num_heads / m.num_kv_heads;
  return std::max(2, (MANY_LANES + per_group - 1) / per_group);
}

const char* bi_isa() { return BI_ISA_NAME; }
#ifndef BI_SOURCES
#define BI_SOURCES "unknown"
#endif
const char* bi_sources() { return BI_SOURCES; }  // see build.py

// Seconds that the parts took since the last call, [NUM_PARTS]. For one caller at a time.
void bi_times(double* seconds) {
  for (int part = 0; part < NUM_PARTS; part++) seconds[part] = part_seconds[part], part_seconds[part] = 0;
}

// From now on thread i runs on the CPUs whose core_of_cpu is i, where there are as many threads as cores; none: no more.
// Threads are those of the process: for one caller at a time, when no kernel runs.
void bi_bind_threads(const int32_t* core_of_cpu, int32_t num_cpus) { bind_threads(core_of_cpu, num_cpus); }

void bi_pack(const bf16* w, bf16* out, int32_t N, int32_t K) { pack(w, out, N, K); }
void bi_linear(const bf16* x, const bf16* w, const bf16* bias, bf16* out, int32_t M, int32_t N, int32_t K) {
  linear(x, w, bias, out, M, N, K);
}
// residual [M, N] += the product
void bi_linear_add(const bf16* x, const bf16* w, const bf16* bias, bf16* residual, int32_t M, int32_t N, int32_t K) {
  linear_add(x, w, bias, residual, M, N, K);
}
// out [M, N / 2]; w and bias in the order of gemm.h
void bi_gate_up_silu(const bf16* x, const bf16* w, const bf16* bias, bf16* out, int32_t M, int32_t N, int32_t K) {
  gate_up_silu(x, w, bias, out, M, N, K);
}
void bi_rms_norm(const bf16* x, bf16* residual, const bf16* weight, float eps, bf16* out, int32_t rows, int32_t n) {
  rms_norm(x, residual, weight, eps, out, rows, n);
}
void bi_silu_and_mul(const bf16* gate_up, bf16* out, int32_t rows, int32_t n) { silu_and_mul(gate_up, out, rows, n); }

void bi_head(const bf16* hidden, const bf16* w, int32_t rows, int32_t V, int32_t K, int32_t num_ids, float* logits,
             float* top, int32_t* argmax, float* lse, float* entropy, const int32_t* target, float* target_logit) {
  OnItsCore place;
  timed(HEAD, [&] {
    head(hidden, w, rows, V, K, num_ids, logits, {top, argmax, lse, entropy, target, target_logit});
  });
}

// One id of each of the rows; columns of parameters as in SamplingParams.
void bi_sample(float* logits, int32_t rows, int32_t V, const float* temperature, const int64_t* top_k,
               const double* top_p, const float* min_p, const int64_t* keys, const int64_t* positions, int32_t writes,
               int32_t* ids) {
  std::vector<SampleParams> params(rows);
  for (int i = 0; i < rows; i++)
    params[i] = {temperature[i], min_p[i], top_k[i], top_p[i], (uint64_t)keys[i], positions[i]};
  OnItsCore place;
  timed(SAMPLING, [&] { sample(logits, rows, V, params.data(), writes, ids); });
}

// q [tokens, heads, dim] rotated and scaled. For tests of the attention by itself.
void bi_tree_attention(const bi_model* m, const bi_batch* b, int32_t window, const bf16* q, bf16* out) {
  const Heads heads{m->num_heads, m->num_kv_heads, m->head_dim};
  Plan plan;
  const RaggedBatch ragged{b->block_tables, b->max_blocks, b->query_starts, b->query_lens, b->num_seqs, b->block_size,
                           m->num_kv_heads, rows_alone(*m)};
  Planner(ragged, window, plan);
  std::vector<float> top((size_t)plan.num_tokens * m->num_heads), total(top.size()), acc(top.size() * m->head_dim);
  KvLayer kv{b->kv_cache, b->block_size, m->head_dim};
  tree_attention(plan, kv, heads, q, window, {top.data(), total.data(), acc.data()}, out);
}

void bi_rope_and_store_kv(const bi_model* m, const bi_batch* b, const bf16* q_norm, const bf16* k_norm,
                          const bf16* qkv, const int32_t* positions, bf16* q, uint8_t* is_finite) {
  rope_and_store_kv(qkv, q_norm, k_norm, m->eps, {m->cos, m->sin, m->rope_dim}, positions, b->slots, b->num_tokens,
                    {m->num_heads, m->num_kv_heads, m->head_dim}, m->scale * LOG2E, b->block_size, q, b->kv_cache,
                    is_finite);
}

static void forward(const bi_model* m, const bi_batch* b, const int64_t* outputs, int32_t num_outputs, bf16* hidden) {
  const int T = b->num_tokens, H = m->hidden;
  const Heads heads{m->num_heads, m->num_kv_heads, m->head_dim};
  const int attn = m->num_heads * m->head_dim, qkv_width = attn + 2 * m->num_kv_heads * m->head_dim;
  const RaggedBatch ragged{b->block_tables, b->max_blocks, b->query_starts, b->query_lens, b->num_seqs, b->block_size,
                           m->num_kv_heads, rows_alone(*m)};
  std::vector<std::pair<int, std::unique_ptr<Plan>>> plans;
  auto plan_for = [&](int window) -> const Plan& {
    for (auto& [of, plan] : plans)
      if (of == window) return *plan;
    plans.emplace_back(window, std::make_unique<Plan>());
    timed(PLANNING, [&] { Planner(ragged, window, *plans.back().second); });
    return *plans.back().second;
  };
  thread_local Scratch<bf16> scratch[5];
  thread_local Scratch<float> states[3];
  // Plain pointers: another thread would see its own thread_local.
  bf16* rows = scratch[0].at_least((size_t)T * H);  // the residual stream
  bf16* const x = scratch[1].at_least((size_t)T * H);
  bf16* const wide = scratch[2].at_least((size_t)T * qkv_width);
  bf16* const q = scratch[3].at_least((size_t)T * attn);
  bf16* const between = scratch[4].at_least((size_t)T * std::max(attn, m->intermediate));
  const State state{states[0].at_least((size_t)T * m->num_heads), states[1].at_least((size_t)T * m->num_heads),
                    states[2].at_least((size_t)T * attn)};
  std::vector<uint8_t> is_finite(T, 1);
#pragma omp parallel for schedule(static)
  for (int t = 0; t < T; t++)
    memcpy(rows + (size_t)t * H, m->embed + (size_t)b->token_ids[t] * H, sizeof(bf16) * H);
  for (int l = 0; l < m->num_layers; l++) {
    const bi_layer& w = m->layers[l];
    const Plan& plan = plan_for(w.window);
    bf16* const cache = b->kv_cache + l * b->layer_stride;
    const KvLayer kv{cache, b->block_size, m->head_dim};
    timed(NORMS, [&] { rms_norm(nullptr, rows, w.attn_norm, m->eps, x, T, H); });
    timed(PRODUCTS, [&] { linear(x, w.qkv, w.qkv_bias, wide, T, qkv_width, H); });
    timed(ROPE_AND_KV, [&] {
      rope_and_store_kv(wide, w.q_norm, w.k_norm, m->eps, {m->cos, m->sin, m->rope_dim}, plan.positions.data(),
                        b->slots, T, heads, m->scale * LOG2E, b->block_size, q, cache, is_finite.data());
    });
    // Behind the last layer's KV only the tokens go on whose final hidden states are wanted.
    const bool cuts = l == m->num_layers - 1 && num_outputs < T;
    const int going_on = cuts ? num_outputs : T;
    if (cuts) {
      Plan some;
      timed(PLANNING, [&] { some = plan.only(outputs, num_outputs); });
      timed(ATTENTION, [&] { tree_attention(some, kv, heads, q, w.window, state, between); });
      // ascending: what is overwritten has been moved
      for (int i = 0; i < num_outputs; i++) {
        memmove(between + (size_t)i * attn, between + (size_t)outputs[i] * attn, sizeof(bf16) * attn);
        memmove(rows + (size_t)i * H, rows + (size_t)outputs[i] * H, sizeof(bf16) * H);
      }
    } else {
      timed(ATTENTION, [&] { tree_attention(plan, kv, heads, q, w.window, state, between); });
    }
    timed(PRODUCTS, [&] { linear_add(between, w.o, w.o_bias, rows, going_on, H, attn); });
    timed(NORMS, [&] { rms_norm(nullptr, rows, w.mlp_norm, m->eps, x, going_on, H); });
    timed(PRODUCTS, [&] {
      gate_up_silu(x, w.gate_up, w.gate_up_bias, between, going_on, 2 * m->intermediate, H);
      linear_add(between, w.down, w.down_bias, rows, going_on, H, m->intermediate);
    });
  }
  bf16* const normed = num_outputs < T ? x : hidden;
  timed(NORMS, [&] { rms_norm(nullptr, rows, m->final_norm, m->eps, normed, num_outputs, H); });
  if (num_outputs == T) return;
  for (int t = 0; t < T; t++) std::fill_n(hidden + (size_t)t * H, H, is_finite[t] ? 0 : 0x7fc0);
  for (int i = 0; i < num_outputs; i++)
    memcpy(hidden + (size_t)outputs[i] * H, normed + (size_t)i * H, sizeof(bf16) * H);
}

// Blocks `sources` of a pool [layers, blocks, block_bytes] onto blocks `targets`; none is both.
void bi_copy_blocks(char* pool, int32_t layers, int64_t layer_bytes, int64_t block_bytes, const int64_t* sources,
                    const int64_t* targets, int32_t count) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < (int64_t)layers * count; i++) {
    char* layer = pool + i / count * layer_bytes;
    memcpy(layer + targets[i % count] * block_bytes, layer + sources[i % count] * block_bytes, block_bytes);
  }
}

// Stores the tokens' KV and writes the final hidden states [num_tokens, hidden] of the tokens `outputs`, ascending. The
// other rows are zero, or NaN where the token's KV in some layer holds NaN or infinity.
// Returns 0, or 1 where there was no memory for the step: then hidden means nothing, and the step may be made again.
int32_t bi_forward(const bi_model* m, const bi_batch* b, const int64_t* outputs, int32_t num_outputs, bf16* hidden) {
  OnItsCore place;
  try {
    forward(m, b, outputs, num_outputs, hidden);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // extern "C"
