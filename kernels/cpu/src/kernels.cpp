// The C interface, and a decoder's forward pass made of the kernels. Built once per instruction set.
#include <omp.h>

#include <memory>
#include <vector>

#include "attention.h"
#include "gemm.h"
#include "head.h"
#include "ops.h"
#include "plan.h"
#include "sample.h"

using namespace batchinfer;

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

void bi_pack(const bf16* w, bf16* out, int32_t N, int32_t K) { pack(w, out, N, K); }
void bi_linear(const bf16* x, const bf16* w, const bf16* bias, bf16* out, int32_t M, int32_t N, int32_t K) {
  linear(x, w, bias, out, M, N, K);
}
void bi_rms_norm(const bf16* x, bf16* residual, const bf16* weight, float eps, bf16* out, int32_t rows, int32_t n) {
  rms_norm(x, residual, weight, eps, out, rows, n);
}
void bi_silu_and_mul(const bf16* gate_up, bf16* out, int32_t rows, int32_t n) { silu_and_mul(gate_up, out, rows, n); }

void bi_head(const bf16* hidden, const bf16* w, int32_t rows, int32_t V, int32_t K, int32_t num_ids, float* logits,
             float* top, int32_t* argmax, float* lse, float* entropy, const int32_t* target, float* target_logit) {
  head(hidden, w, rows, V, K, num_ids, logits, {top, argmax, lse, entropy, target, target_logit});
}

// One id of each of the rows; columns of parameters as in SamplingParams.
void bi_sample(float* logits, int32_t rows, int32_t V, const float* temperature, const int64_t* top_k,
               const double* top_p, const float* min_p, const int64_t* keys, const int64_t* positions, int32_t writes,
               int32_t* ids) {
  std::vector<SampleParams> params(rows);
  for (int i = 0; i < rows; i++)
    params[i] = {temperature[i], min_p[i], top_k[i], top_p[i], (uint64_t)keys[i], positions[i]};
  sample(logits, rows, V, params.data(), writes, ids);
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
                          const bf16* qkv, const int32_t* positions, bf16* q) {
  rope_and_store_kv(qkv, q_norm, k_norm, m->eps, {m->cos, m->sin, m->rope_dim}, positions, b->slots, b->num_tokens,
                    {m->num_heads, m->num_kv_heads, m->head_dim}, m->scale * LOG2E, b->block_size, q, b->kv_cache);
}

// Stores the tokens' KV and writes final hidden states [num_tokens, hidden].
void bi_forward(const bi_model* m, const bi_batch* b, bf16* hidden) {
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
    Planner(ragged, window, *plans.back().second);
    return *plans.back().second;
  };
  // Kept between steps: fresh pages would be cleared by the kernel at every step.
  thread_local std::vector<bf16> residual, x, wide, q, attended;
  thread_local std::vector<float> top, total, acc;
  auto size = [](auto& v, size_t n) {
    if (v.size() < n) v.resize(n);
  };
  size(residual, (size_t)T * H), size(x, (size_t)T * H);
  size(wide, (size_t)T * std::max(qkv_width, 2 * m->intermediate));
  size(q, (size_t)T * attn), size(attended, (size_t)T * std::max(attn, m->intermediate));
  size(top, (size_t)T * m->num_heads), size(total, (size_t)T * m->num_heads), size(acc, (size_t)T * attn);
  bf16* const rows = residual.data();  // thread_local: another thread would see its own
#pragma omp parallel for schedule(static)
  for (int t = 0; t < T; t++)
    memcpy(rows + (size_t)t * H, m->embed + (size_t)b->token_ids[t] * H, sizeof(bf16) * H);
  const bf16* update = nullptr;
  for (int l = 0; l < m->num_layers; l++) {
    const bi_layer& w = m->layers[l];
    const Plan& plan = plan_for(w.window);
    bf16* const cache = b->kv_cache + l * b->layer_stride;
    rms_norm(update, residual.data(), w.attn_norm, m->eps, hidden, T, H);
    linear(hidden, w.qkv, w.qkv_bias, wide.data(), T, qkv_width, H);
    rope_and_store_kv(wide.data(), w.q_norm, w.k_norm, m->eps, {m->cos, m->sin, m->rope_dim}, plan.positions.data(),
                      b->slots, T, heads, m->scale * LOG2E, b->block_size, q.data(), cache);
    KvLayer kv{cache, b->block_size, m->head_dim};
    tree_attention(plan, kv, heads, q.data(), w.window, {top.data(), total.data(), acc.data()}, attended.data());
    linear(attended.data(), w.o, w.o_bias, x.data(), T, H, attn);
    rms_norm(x.data(), residual.data(), w.mlp_norm, m->eps, hidden, T, H);
    linear(hidden, w.gate_up, w.gate_up_bias, wide.data(), T, 2 * m->intermediate, H);
    silu_and_mul(wide.data(), attended.data(), T, m->intermediate);
    linear(attended.data(), w.down, w.down_bias, x.data(), T, H, m->intermediate);
    update = x.data();
  }
  rms_norm(update, residual.data(), m->final_norm, m->eps, hidden, T, H);
}

}  // extern "C"
