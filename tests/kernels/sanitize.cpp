// Runs every kernel on odd shapes, every buffer of exactly the size it must have. Built with the address and
// undefined-behaviour sanitizers by `make sanitize`, once for each instruction set; they end the program at a fault.
// Results are compared only with themselves: alone and in company must be the same bits.
#include "../../kernels/cpu/src/kernels.cpp"

#include <cstdio>
#include <cstdlib>

namespace {

uint32_t state = 12345;
uint32_t draw() {
  state ^= state << 13, state ^= state >> 17, state ^= state << 5;
  return state;
}
float uniform() { return (float)(draw() >> 8) / (1 << 23) - 1.f; }

std::vector<bf16> random_bf16(size_t count, float scale = 1.f) {
  std::vector<bf16> out(count);
  for (auto& x : out) x = narrow(uniform() * scale);
  return out;
}

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s: %s\n", bi_isa(), what);
  std::exit(1);
}

template <class T>
std::vector<T> rows_of_copy(const std::vector<T>& all, int begin, int count, int width) {
  return {all.begin() + (size_t)begin * width, all.begin() + (size_t)(begin + count) * width};
}

std::vector<bf16> packed(const std::vector<bf16>& w, int N, int K) {
  std::vector<bf16> out((size_t)(N + 15) / 16 * 16 * K);
  bi_pack(w.data(), out.data(), N, K);
  return out;
}

void products() {
  const int shapes[][2] = {{1, 16}, {17, 48}, {100, 80}, {272, 32}, {96, 48}, {160, 16}};
  for (auto [N, K] : shapes) {
    const auto w = packed(random_bf16((size_t)N * K), N, K), x = random_bf16(300 * K), bias = random_bf16(N);
    for (const bf16* b : {(const bf16*)nullptr, bias.data()}) {
      std::vector<bf16> whole(300 * N);
      bi_linear(x.data(), w.data(), b, whole.data(), 300, N, K);
      for (int M : {1, 2, 3, 5, 7, 8, 9, 17, 31, 257}) {
        const auto part = rows_of_copy(x, 300 - M, M, K);
        std::vector<bf16> out(M * N);
        bi_linear(part.data(), w.data(), b, out.data(), M, N, K);
        expect(out == rows_of_copy(whole, 300 - M, M, N), "linear");
        if (N % 16 == 0) {
          auto sum = random_bf16(M * N);
          bi_linear_add(part.data(), w.data(), b, sum.data(), M, N, K);
        }
        if (N % 32 == 0) {
          std::vector<bf16> half(M * N / 2);
          bi_gate_up_silu(part.data(), w.data(), b, half.data(), M, N, K);
        }
      }
    }
  }
}

void rows() {
  for (int n : {16, 48, 576})
    for (int M : {1, 7, 40}) {
      const auto x = random_bf16(M * n), weight = random_bf16(n), gate_up = random_bf16(2 * M * n, 200.f);
      auto residual = random_bf16(M * n);
      std::vector<bf16> out(M * n);
      bi_rms_norm(x.data(), residual.data(), weight.data(), 1e-5f, out.data(), M, n);
      bi_rms_norm(nullptr, residual.data(), weight.data(), 1e-5f, out.data(), M, n);
      bi_silu_and_mul(gate_up.data(), out.data(), M, n);
    }
}

void heads() {
  const float bad[] = {0.f, 1.f / 0.f, -1.f / 0.f, 0.f / 0.f};
  for (int V : {1, 15, 16, 17, 272, 1003})
    for (int M : {1, 7, 8, 33, 257})
      for (float value : bad) {
        const int K = 16, num_ids = V - V / 5;
        const auto w = packed(random_bf16((size_t)V * K), V, K);
        auto hidden = random_bf16(M * K);
        if (!(value == 0.f)) hidden[M / 2 * K] = narrow(value);
        std::vector<float> logits((size_t)M * V), top(M), lse(M), entropy(M), target_logit(M), top2(M);
        std::vector<int32_t> argmax(M), argmax2(M), target(M);
        for (auto& id : target) id = draw() % V;
        bi_head(hidden.data(), w.data(), M, V, K, num_ids, logits.data(), top.data(), argmax.data(), lse.data(),
                entropy.data(), target.data(), target_logit.data());
        bi_head(hidden.data(), w.data(), M, V, K, num_ids, nullptr, top2.data(), argmax2.data(), nullptr, nullptr,
                nullptr, nullptr);
        for (int i = 0; i < M; i++) {
          const bool is_bad = i == M / 2 && !(value == 0.f);
          expect(std::isnan(top[i]) == is_bad && std::isnan(lse[i]) == is_bad, "a bad row is marked, no other");
          if (is_bad) continue;
          expect(top[i] == top2[i] && argmax[i] == argmax2[i] && argmax[i] < num_ids, "argmax");
          expect(target_logit[i] == logits[(size_t)i * V + target[i]], "target");
        }
      }
}

void samples() {
  const float inf = std::numeric_limits<float>::infinity();
  for (int V : {1, 3, 15, 64, 65, 1003})
    for (int M : {1, 7, 24}) {
      std::vector<float> logits((size_t)M * V), temperature(M), min_p(M);
      std::vector<int64_t> top_k(M), keys(M), positions(M);
      std::vector<double> top_p(M);
      std::vector<int32_t> ids(M), again(M);
      for (auto& x : logits) x = uniform() * 8;
      for (int i = 0; i < M; i++) {
        temperature[i] = i % 5 ? 0.7f : 1e-5f, min_p[i] = i % 3 ? 0.f : 0.2f, top_k[i] = i % 4 ? 0 : V / 2 + 1;
        top_p[i] = i % 2 ? 1. : 0.6, keys[i] = ((int64_t)draw() << 32) - 7, positions[i] = draw() % 5000;
      }
      if (V > 3) logits[1] = -inf, logits[V - 1] = logits[V - 2];
      // Broken rows, whose id does not matter: NaN first, in the middle, everywhere; an infinite logit.
      const int broken[] = {M - 1, M - 2, M - 3, M - 4};
      if (M > 4) {
        logits[(size_t)broken[0] * V] = NAN, logits[(size_t)broken[1] * V + V / 2] = NAN;
        std::fill_n(logits.begin() + (size_t)broken[2] * V, V, NAN), logits[(size_t)broken[3] * V + V / 2] = inf;
      }
      for (int writes : {0, 1}) {
        bi_sample(logits.data(), M, V, temperature.data(), top_k.data(), top_p.data(), min_p.data(), keys.data(),
                  positions.data(), writes, writes ? again.data() : ids.data());
        for (int id : writes ? again : ids) expect(id >= 0 && id < V, "ids lie in the vocabulary");
      }
      expect(ids == again, "drawing again gives the same ids");
    }
}

struct Shape {
  int heads, kv_heads, dim, rope_dim, block_size, window;
  bool has_norms;
};

// A model of two layers, one of them with a window, over a cache of `num_blocks`.
struct Tiny {
  static constexpr int H = 48, I = 80, V = 50, POSITIONS = 400;
  Shape s;
  int num_blocks;
  std::vector<std::vector<bf16>> kept;
  std::vector<float> cos, sin;
  bi_layer layers[2];
  bi_model model;
  std::vector<bf16> cache;

  const bf16* keep(std::vector<bf16> values) {
    kept.push_back(std::move(values));
    return kept.back().data();
  }
  const bf16* weight(int N, int K) { return keep(packed(random_bf16((size_t)N * K, 0.2f), N, K)); }

  Tiny(const Shape& shape, int blocks) : s(shape), num_blocks(blocks) {
    for (int i = 0; i < POSITIONS * s.rope_dim / 2; i++) cos.push_back(uniform()), sin.push_back(uniform());
    const int attn = s.heads * s.dim, qkv = attn + 2 * s.kv_heads * s.dim;
    for (int l = 0; l < 2; l++) {
      auto& w = layers[l];
      w = {};
      w.attn_norm = keep(random_bf16(H)), w.mlp_norm = keep(random_bf16(H));
      w.qkv = weight(qkv, H), w.o = weight(H, attn), w.gate_up = weight(2 * I, H), w.down = weight(H, I);
      if (s.has_norms) w.q_norm = keep(random_bf16(s.dim)), w.k_norm = keep(random_bf16(s.dim));
      else w.qkv_bias = keep(random_bf16(qkv)), w.o_bias = keep(random_bf16(H));
      w.window = l ? s.window : 0;
    }
    model = {2, H, I, s.heads, s.kv_heads, s.dim, s.rope_dim, 1e-5f, 0.2f, keep(random_bf16(V * H)),
             keep(random_bf16(H)), cos.data(), sin.data(), layers};
    cache.assign(2 * layer_stride(), 0);
  }
  size_t layer_stride() const { return (size_t)num_blocks * 2 * s.block_size * s.kv_heads * s.dim; }
};

struct Seq {
  std::vector<int> blocks;
  int start, count;  // query tokens
};

// Hidden states of each sequence; token ids depend on the position and the block alone.
std::vector<std::vector<bf16>> forward(Tiny& tiny, const std::vector<Seq>& seqs) {
  size_t max_blocks = 0;
  for (auto& seq : seqs) max_blocks = std::max(max_blocks, seq.blocks.size());
  std::vector<int64_t> ids, slots;
  std::vector<int32_t> tables(seqs.size() * max_blocks, 0), starts, lens;
  for (size_t i = 0; i < seqs.size(); i++) {
    std::copy(seqs[i].blocks.begin(), seqs[i].blocks.end(), tables.begin() + i * max_blocks);
    starts.push_back(seqs[i].start), lens.push_back(seqs[i].count);
    for (int p = seqs[i].start; p < seqs[i].start + seqs[i].count; p++) {
      const int block = seqs[i].blocks[p / tiny.s.block_size];
      ids.push_back((p * 7 + block * 5) % Tiny::V);
      slots.push_back((int64_t)block * tiny.s.block_size + p % tiny.s.block_size);
    }
  }
  bi_batch batch{(int32_t)ids.size(), (int32_t)seqs.size(), tiny.s.block_size, (int64_t)max_blocks, ids.data(),
                 slots.data(), tables.data(), starts.data(), lens.data(), tiny.cache.data(),
                 (int64_t)tiny.layer_stride()};
  std::vector<bf16> hidden(ids.size() * Tiny::H);
  std::vector<int64_t> all(ids.size()), some;
  for (size_t t = 0; t < ids.size(); t++) {
    all[t] = t;
    if (t % 3 == 1) some.push_back(t);
  }
  bi_forward(&tiny.model, &batch, all.data(), (int)all.size(), hidden.data());
  std::vector<bf16> partly(hidden.size());
  bi_forward(&tiny.model, &batch, some.data(), (int)some.size(), partly.data());
  for (int64_t t : some)
    expect(rows_of_copy(partly, t, 1, Tiny::H) == rows_of_copy(hidden, t, 1, Tiny::H), "forward of some outputs");
  std::vector<std::vector<bf16>> out;
  int at = 0;
  for (auto& seq : seqs) out.push_back(rows_of_copy(hidden, at, seq.count, Tiny::H)), at += seq.count;
  return out;
}

// A family: all go on from the first 128 tokens of the first one, in queries of these lengths.
void passes(const Shape& shape, const std::vector<int>& counts) {
  const int bs = shape.block_size, stem = 128 / bs, each = (150 + bs) / bs + 1;
  Tiny tiny(shape, stem + 1 + (int)counts.size() * each);
  int next = 0;
  std::vector<Seq> seqs;
  Seq first{{}, 0, stem * bs};
  for (int i = 0; i < stem; i++) first.blocks.push_back(next++);
  for (size_t i = 0; i < counts.size(); i++) {
    Seq seq{first.blocks, stem * bs, counts[i]};
    while ((int)seq.blocks.size() * bs < seq.start + seq.count) seq.blocks.push_back(next++);
    seqs.push_back(seq);
  }
  if (first.count) forward(tiny, {first});
  const auto together = forward(tiny, seqs);
  for (auto x : together[0]) expect(std::isfinite(widen(x)), "hidden states are finite");
  for (size_t i = 0; i < seqs.size(); i += 3) {
    expect(forward(tiny, {seqs[i]})[0] == together[i], "alone and in company");
    Seq last = seqs[i];
    last.start += last.count - 1, last.count = 1;
    expect(forward(tiny, {last})[0] == rows_of_copy(together[i], seqs[i].count - 1, 1, Tiny::H), "last token alone");
  }
}

}  // namespace

void blocks() {
  std::vector<char> pool(3 * 7 * 96), before;
  for (auto& x : pool) x = (char)draw();
  before = pool;
  const int64_t sources[] = {1, 3}, targets[] = {6, 0};
  bi_copy_blocks(pool.data(), 3, 7 * 96, 96, sources, targets, 2);
  for (int layer = 0; layer < 3; layer++)
    for (int i = 0; i < 2; i++)
      expect(!memcmp(&pool[(layer * 7 + targets[i]) * 96], &before[(layer * 7 + sources[i]) * 96], 96), "copy_blocks");
}

int main() {
  const int32_t core_of_cpu[] = {0, 1, 2};  // as many as threads: see run_sanitized.py
  bi_bind_threads(core_of_cpu, 3);
  blocks();
  products();
  rows();
  heads();
  samples();
  const std::vector<int> mixed = {1, 2, 3, 70, 1, 5, 9, 25, 1, 33, 64, 130}, decodes(37, 1);
  const Shape shapes[] = {
      {2, 1, 16, 16, 16, 0, false}, {6, 2, 64, 64, 64, 70, true},   {4, 4, 128, 128, 32, 8, false},
      {7, 1, 48, 24, 128, 1, true}, {8, 1, 256, 256, 16, 130, true}, {10, 2, 80, 80, 256, 64, false},
  };
  for (const auto& shape : shapes) passes(shape, mixed), passes(shape, decodes);
  std::printf("sanitize: %s holds\n", bi_isa());
}
