// Sixteen fp32 lanes and sixteen pairs of bf16, for three instruction sets. All kernels are written on these.
//
// The arithmetic of a lane is the same in every function that uses it, so results do not depend on which
// kernel handles a row. Between instruction sets the last bits may differ (fused or separate multiply-add).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__)
#define BI_AVX512 1
#define BI_ISA_NAME "avx512_bf16"
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__)
#define BI_AVX2 1
#define BI_ISA_NAME "avx2"
#include <immintrin.h>
#else
#define BI_PORTABLE 1
#define BI_ISA_NAME "portable"
#endif

#define BI_INLINE static inline __attribute__((always_inline))
#define BI_UNROLL _Pragma("GCC unroll 32")

namespace batchinfer {

using bf16 = uint16_t;

BI_INLINE float widen(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

// To nearest, ties to even; NaN stays NaN.
BI_INLINE bf16 narrow(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (bf16)((bits >> 16) | 0x40);
  return (bf16)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// Whether no value is NaN or infinite.
BI_INLINE bool all_finite(const bf16* x, int n) {
  uint16_t largest = 0;
  for (int i = 0; i < n; i++) {
    const uint16_t magnitude = x[i] & 0x7fff;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest < 0x7f80;
}

#if BI_AVX512
struct F16 {
  __m512 v;
};
struct P16 {
  __m512i v;
};
BI_INLINE F16 splat(float x) { return {_mm512_set1_ps(x)}; }
BI_INLINE F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
BI_INLINE void store(float* p, F16 x) { _mm512_storeu_ps(p, x.v); }
BI_INLINE F16 add(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
BI_INLINE F16 sub(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
BI_INLINE F16 mul(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
BI_INLINE F16 div(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
BI_INLINE F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
BI_INLINE F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
BI_INLINE F16 fraction(F16 a) { return {_mm512_reduce_ps(a.v, 9)}; }  // a - floor(a)
BI_INLINE F16 times_power_of_floor(F16 x, F16 exponent) { return {_mm512_scalef_ps(x.v, exponent.v)}; }
BI_INLINE bool any_differs(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_NEQ_UQ) != 0; }
// a where x > y, else b
BI_INLINE F16 where_greater(F16 x, F16 y, F16 a, F16 b) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_GT_OQ), b.v, a.v)};
}
BI_INLINE float reduce_max(F16 x) { return _mm512_reduce_max_ps(x.v); }
BI_INLINE float first_lane(F16 x) { return _mm512_cvtss_f32(x.v); }
// x[i] lane j becomes x[j] lane i; 32 bits are moved, whatever they hold.
BI_INLINE void transpose(F16 (&x)[16]) {
  __m512 a[16], b[16];
  BI_UNROLL for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(x[i].v, x[i + 1].v);
    a[i + 1] = _mm512_unpackhi_ps(x[i].v, x[i + 1].v);
  }
  BI_UNROLL for (int i = 0; i < 16; i += 4) BI_UNROLL for (int j = 0; j < 2; j++) {
    const __m512d low = _mm512_castps_pd(a[i + j]), high = _mm512_castps_pd(a[i + j + 2]);
    b[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
    b[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
  }
  // b[i + j]: of rows i .. i + 3, columns j, j + 4, j + 8, j + 12, a quarter each
  BI_UNROLL for (int j = 0; j < 4; j++) {
    const __m512 p = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88), q = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xdd);
    const __m512 r = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88), s = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xdd);
    x[j].v = _mm512_shuffle_f32x4(p, r, 0x88), x[j + 8].v = _mm512_shuffle_f32x4(p, r, 0xdd);
    x[j + 4].v = _mm512_shuffle_f32x4(q, s, 0x88), x[j + 12].v = _mm512_shuffle_f32x4(q, s, 0xdd);
  }
}
BI_INLINE P16 load_pairs(const bf16* p) { return {_mm512_loadu_si512(p)}; }
BI_INLINE void store_pairs(bf16* p, P16 x) { _mm512_storeu_si512(p, x.v); }
BI_INLINE P16 splat_pair(const bf16* p) {
  int32_t x;
  memcpy(&x, p, 4);
  return {_mm512_set1_epi32(x)};
}
BI_INLINE P16 ones() { return {_mm512_set1_epi16(0x3f80)}; }
// acc + a.low * b.low + a.high * b.high per lane, products and sum in fp32
BI_INLINE F16 dot2(F16 acc, P16 a, P16 b) { return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)}; }
BI_INLINE P16 to_pairs(F16 low, F16 high) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return {_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v))};
}
// 32 consecutive values: a, then b
BI_INLINE void store_narrow2(bf16* p, F16 a, F16 b) { _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v)); }
BI_INLINE void store_narrow(bf16* p, F16 x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x.v)); }
// The nearest bf16.
BI_INLINE F16 rounded(F16 x) {
  const __m256i narrowed = (__m256i)_mm512_cvtneps_pbh(x.v);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrowed), 16))};
}
BI_INLINE F16 load_widen(const bf16* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
// To the second level: more requests can be under way than from the first (27 against 20 GB/s on a Zen 4).
BI_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }
// 16 values into the low (even) or high halves of the pairs at p, the other halves stay.
BI_INLINE void store_halves(bf16* p, const bf16* values, bool high) {
  __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)values)), pairs = _mm512_loadu_si512(p);
  pairs = high ? _mm512_mask_mov_epi16(pairs, 0xaaaaaaaau, _mm512_slli_epi32(x, 16))
               : _mm512_mask_mov_epi16(pairs, 0x55555555u, x);
  _mm512_storeu_si512(p, pairs);
}

#elif BI_AVX2
struct F16 {
  __m256 a, b;
};
struct P16 {
  __m256i a, b;
};
BI_INLINE F16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
BI_INLINE F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
BI_INLINE void store(float* p, F16 x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
BI_INLINE F16 add(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
BI_INLINE F16 sub(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
BI_INLINE F16 mul(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
BI_INLINE F16 div(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
BI_INLINE F16 fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
BI_INLINE F16 max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
BI_INLINE F16 fraction(F16 x) {
  return {_mm256_sub_ps(x.a, _mm256_floor_ps(x.a)), _mm256_sub_ps(x.b, _mm256_floor_ps(x.b))};
}
BI_INLINE __m256 times_power_of_floor(__m256 x, __m256 exponent) {
  // Below 2^-126 is zero: exponents are clamped to one whose bits spell 0.
  const __m256 whole = _mm256_floor_ps(_mm256_max_ps(exponent, _mm256_set1_ps(-127.f)));
  const __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23)));
}
BI_INLINE F16 times_power_of_floor(F16 x, F16 e) {
  return {times_power_of_floor(x.a, e.a), times_power_of_floor(x.b, e.b)};
}
BI_INLINE bool any_differs(F16 x, F16 y) {
  return _mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_NEQ_UQ)) ||
         _mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_NEQ_UQ));
}
BI_INLINE F16 where_greater(F16 x, F16 y, F16 a, F16 b) {
  return {_mm256_blendv_ps(b.a, a.a, _mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ)),
          _mm256_blendv_ps(b.b, a.b, _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ))};
}
BI_INLINE float reduce_max(F16 x) {
  __m256 m = _mm256_max_ps(x.a, x.b);
  __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
  h = _mm_max_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_max_ss(h, _mm_shuffle_ps(h, h, 1)));
}
BI_INLINE float first_lane(F16 x) { return _mm256_cvtss_f32(x.a); }
BI_INLINE P16 load_pairs(const bf16* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 16))};
}
BI_INLINE void store_pairs(bf16* p, P16 x) {
  _mm256_storeu_si256((__m256i*)p, x.a), _mm256_storeu_si256((__m256i*)(p + 16), x.b);
}
BI_INLINE P16 splat_pair(const bf16* p) {
  int32_t x;
  memcpy(&x, p, 4);
  return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
BI_INLINE P16 ones() { return {_mm256_set1_epi16(0x3f80), _mm256_set1_epi16(0x3f80)}; }
BI_INLINE __m256 low_half(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
BI_INLINE __m256 high_half(__m256i x) {
  return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000)));
}
BI_INLINE __m256 dot2(__m256 acc, __m256i x, __m256i y) {
  acc = _mm256_fmadd_ps(low_half(x), low_half(y), acc);
  return _mm256_fmadd_ps(high_half(x), high_half(y), acc);
}
BI_INLINE F16 dot2(F16 acc, P16 x, P16 y) { return {dot2(acc.a, x.a, y.a), dot2(acc.b, x.b, y.b)}; }
BI_INLINE __m256i narrow_bits(__m256 x) {  // in the low half of each lane
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i out = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(out, _mm256_set1_epi32(0x7fc0), nan);
}
BI_INLINE __m256i to_pairs(__m256 low, __m256 high) {
  return _mm256_or_si256(narrow_bits(low), _mm256_slli_epi32(narrow_bits(high), 16));
}
BI_INLINE P16 to_pairs(F16 low, F16 high) { return {to_pairs(low.a, high.a), to_pairs(low.b, high.b)}; }
BI_INLINE void store_narrow(bf16* p, F16 x) {
  __m256i packed = _mm256_packus_epi32(narrow_bits(x.a), narrow_bits(x.b));  // interleaved by halves
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}
BI_INLINE void store_narrow2(bf16* p, F16 a, F16 b) { store_narrow(p, a), store_narrow(p + 16, b); }
BI_INLINE F16 load_widen(const bf16* p) {
  auto half = [](const bf16* q) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)q)), 16));
  };
  return {half(p), half(p + 8)};
}
BI_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

#else
struct F16 {
  float v[16];
};
struct P16 {
  uint32_t v[16];
};
#define BI_LANES(expr)                      \
  F16 out;                                  \
  for (int i = 0; i < 16; i++) out.v[i] = (expr); \
  return out
BI_INLINE F16 splat(float x) { BI_LANES(x); }
BI_INLINE F16 load(const float* p) {
  F16 out;
  memcpy(out.v, p, 64);
  return out;
}
BI_INLINE void store(float* p, F16 x) { memcpy(p, x.v, 64); }
BI_INLINE F16 add(F16 a, F16 b) { BI_LANES(a.v[i] + b.v[i]); }
BI_INLINE F16 sub(F16 a, F16 b) { BI_LANES(a.v[i] - b.v[i]); }
BI_INLINE F16 mul(F16 a, F16 b) { BI_LANES(a.v[i] * b.v[i]); }
BI_INLINE F16 div(F16 a, F16 b) { BI_LANES(a.v[i] / b.v[i]); }
BI_INLINE F16 fma(F16 a, F16 b, F16 c) { BI_LANES(a.v[i] * b.v[i] + c.v[i]); }
BI_INLINE F16 max(F16 a, F16 b) { BI_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
// Adding and taking away 1.5 * 2^23 rounds to nearest for |x| < 2^22; larger values (masked scores) pass.
BI_INLINE float whole_part(float x) {
  float near = std::fabs(x) < 4194304.f ? (x + 12582912.f) - 12582912.f : x;
  return near > x ? near - 1.f : near;
}
BI_INLINE F16 fraction(F16 a) { BI_LANES(a.v[i] - whole_part(a.v[i])); }
BI_INLINE F16 times_power_of_floor(F16 x, F16 e) {
  F16 out;
  for (int i = 0; i < 16; i++) {
    float clamped = e.v[i] > -127.f ? e.v[i] : -127.f;
    uint32_t bits = (uint32_t)((int32_t)whole_part(clamped) + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    out.v[i] = x.v[i] * power;
  }
  return out;
}
BI_INLINE bool any_differs(F16 a, F16 b) {
  bool out = false;
  for (int i = 0; i < 16; i++) out |= !(a.v[i] == b.v[i]);
  return out;
}
BI_INLINE F16 where_greater(F16 x, F16 y, F16 a, F16 b) { BI_LANES(x.v[i] > y.v[i] ? a.v[i] : b.v[i]); }
BI_INLINE float reduce_max(F16 x) {
  float out = x.v[0];
  for (int i = 1; i < 16; i++) out = x.v[i] > out ? x.v[i] : out;
  return out;
}
BI_INLINE float first_lane(F16 x) { return x.v[0]; }
BI_INLINE P16 load_pairs(const bf16* p) {
  P16 out;
  memcpy(out.v, p, 64);
  return out;
}
BI_INLINE void store_pairs(bf16* p, P16 x) { memcpy(p, x.v, 64); }
BI_INLINE P16 splat_pair(const bf16* p) {
  uint32_t x;
  memcpy(&x, p, 4);
  P16 out;
  for (int i = 0; i < 16; i++) out.v[i] = x;
  return out;
}
BI_INLINE P16 ones() {
  P16 out;
  for (int i = 0; i < 16; i++) out.v[i] = 0x3f803f80u;
  return out;
}
BI_INLINE float from_bits(uint32_t x) {
  float out;
  memcpy(&out, &x, 4);
  return out;
}
BI_INLINE F16 dot2(F16 acc, P16 a, P16 b) {
  F16 out;
  for (int i = 0; i < 16; i++) {
    float low = acc.v[i] + from_bits(a.v[i] << 16) * from_bits(b.v[i] << 16);
    out.v[i] = low + from_bits(a.v[i] & 0xffff0000u) * from_bits(b.v[i] & 0xffff0000u);
  }
  return out;
}
BI_INLINE P16 to_pairs(F16 low, F16 high) {
  P16 out;
  for (int i = 0; i < 16; i++) out.v[i] = narrow(low.v[i]) | (uint32_t)narrow(high.v[i]) << 16;
  return out;
}
BI_INLINE void store_narrow(bf16* p, F16 x) {
  for (int i = 0; i < 16; i++) p[i] = narrow(x.v[i]);
}
BI_INLINE void store_narrow2(bf16* p, F16 a, F16 b) { store_narrow(p, a), store_narrow(p + 16, b); }
BI_INLINE F16 load_widen(const bf16* p) { BI_LANES(widen(p[i])); }
BI_INLINE void prefetch(const void*) {}
#endif

#if !BI_AVX512
BI_INLINE void transpose(F16 (&x)[16]) {
  uint32_t lanes[16][16], turned[16][16];
  for (int i = 0; i < 16; i++) memcpy(lanes[i], &x[i], 64);
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) turned[j][i] = lanes[i][j];
  for (int i = 0; i < 16; i++) memcpy(&x[i], turned[i], 64);
}
BI_INLINE void store_halves(bf16* p, const bf16* values, bool high) {
  for (int i = 0; i < 16; i++) p[2 * i + high] = values[i];
}
#endif

// 2^x to about 2e-7 relative (minimax on [0, 1), exact at 0); 0 far below, so that masked scores vanish.
BI_INLINE F16 exp2(F16 x) {
  const F16 part = fraction(x);
  F16 p = splat(1.865033719e-3f);
  p = fma(p, part, splat(9.022697415e-3f));
  p = fma(p, part, splat(5.579448357e-2f));
  p = fma(p, part, splat(2.401666025e-1f));
  p = fma(p, part, splat(6.931510350e-1f));
  p = fma(p, part, splat(1.f));
  return times_power_of_floor(p, x);
}
constexpr float LOG2E = 1.44269504088896340736f;

#if !BI_AVX512
BI_INLINE F16 rounded(F16 x) {
  alignas(64) bf16 narrowed[16];
  store_narrow(narrowed, x);
  return load_widen(narrowed);
}
#endif

BI_INLINE F16 silu(F16 x) {
  // exp(-x) is kept finite: 2^126 already makes the quotient 0.
  F16 power = mul(x, splat(-LOG2E));
  power = where_greater(power, splat(126.f), splat(126.f), power);
  return div(x, add(splat(1.f), exp2(power)));
}

}  // namespace batchinfer
