// Loops over vectors, compiled for several CPUs: ForCpu runs the ones for that which runs it.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

// Vectors are passed between functions that are all inlined.
#pragma GCC diagnostic ignored "-Wpsabi"

#define DYNAMO_MOE_INLINE [[gnu::always_inline]] inline
#define DYNAMO_MOE_INLINED __attribute__((always_inline))  // A lambda.

namespace dynamo_moe::onnxruntime {

// Numbers of a vector; a CPU with AVX-512 has vectors for the wide ones.
inline constexpr std::int64_t kLanes = 8;
inline constexpr std::int64_t kWideLanes = 16;

template <std::int64_t Lanes>
struct VectorOf {
  using Floats [[gnu::vector_size(Lanes * sizeof(float))]] = float;
  using Integers [[gnu::vector_size(Lanes * sizeof(std::int32_t))]] = std::int32_t;
};
template <std::int64_t Lanes>
using Floats = typename VectorOf<Lanes>::Floats;
template <std::int64_t Lanes>
using Integers = typename VectorOf<Lanes>::Integers;

// The same bits as another type.
template <typename To, typename From>
DYNAMO_MOE_INLINE To BitsOf(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// The numbers at some places; the last bits of an integer name one.
template <std::int64_t Lanes>
DYNAMO_MOE_INLINE Floats<Lanes> At(const Floats<Lanes>& numbers, const Integers<Lanes>& places) {
#ifdef __clang__
  Floats<Lanes> found = {};
  for (std::int64_t i = 0; i < Lanes; ++i) {
    found[i] = numbers[places[i] & (Lanes - 1)];
  }
  return found;
#else
  return __builtin_shuffle(numbers, places);
#endif
}

// Gives the numbers of some columns to a sink: two vectors at a time, one, and then the rest one by
// one. vector_at(column) and one_at(column) return them.
template <std::int64_t Lanes, typename VectorAt, typename OneAt, typename Sink>
DYNAMO_MOE_INLINE void ReadColumns(std::int64_t from, std::int64_t to, const VectorAt& vector_at,
                                   const OneAt& one_at, Sink* sink) {
  std::int64_t column = from;
  for (; column + 2 * Lanes <= to; column += 2 * Lanes) {
    sink->template Vector<0>(column, vector_at(column));
    sink->template Vector<1>(column + Lanes, vector_at(column + Lanes));
  }
  if (column + Lanes <= to) {
    sink->template Vector<0>(column, vector_at(column));
    column += Lanes;
  }
  for (; column < to; ++column) {
    sink->One(column, one_at(column));
  }
}

// A sink that multiplies a row with each of some others. An addition waits for the one before it,
// so there are two sums of each.
template <std::int64_t Count, std::int64_t Lanes>
struct Products {
  const float* others;
  std::int64_t columns;
  Floats<Lanes> sums[Count][2];
  float rest[Count];

  template <std::int64_t Turn>
  DYNAMO_MOE_INLINE void Vector(std::int64_t column, const Floats<Lanes>& numbers) {
    for (std::int64_t r = 0; r < Count; ++r) {
      Floats<Lanes> other;
      std::memcpy(&other, others + r * columns + column, sizeof(other));
      sums[r][Turn] += numbers * other;
    }
  }
  DYNAMO_MOE_INLINE void One(std::int64_t column, float number) {
    for (std::int64_t r = 0; r < Count; ++r) {
      rest[r] += number * others[r * columns + column];
    }
  }
  // Writes them to a column of a matrix with so many.
  DYNAMO_MOE_INLINE void Write(const float* bias, std::int64_t column, std::int64_t width,
                               float* result) const {
    for (std::int64_t r = 0; r < Count; ++r) {
      result[r * width + column] = Sum(r) + (bias == nullptr ? 0 : bias[column]);
    }
  }

 private:
  DYNAMO_MOE_INLINE float Sum(std::int64_t r) const {
    constexpr Integers<kWideLanes> all = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Integers<Lanes> lanes;
    std::memcpy(&lanes, &all, sizeof(lanes));
    Floats<Lanes> sum = sums[r][0] + sums[r][1];
    for (std::int32_t half = Lanes / 2; half > 0; half /= 2) {
      sum += At<Lanes>(sum, lanes + half);
    }
    return sum[0] + rest[r];
  }
};

// Calls a function with a number from 1 to Most as a constant.
template <std::int64_t Most, typename Function>
DYNAMO_MOE_INLINE void WithCount(std::int64_t count, const Function& call) {
  if constexpr (Most > 1) {
    if (count < Most) {
      return WithCount<Most - 1>(count, call);
    }
  }
  call(std::integral_constant<std::int64_t, Most>{});
}

#if defined(__x86_64__) && !defined(__clang__)
template <typename Loop>
[[gnu::target("avx2,fma")]] void RunForAvx2(const Loop& loop) {
  loop(std::integral_constant<std::int64_t, kLanes>{});
}

template <typename Loop>
[[gnu::target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]] void RunForAvx512(const Loop& loop) {
  loop(std::integral_constant<std::int64_t, kWideLanes>{});
}

inline bool HasAvx2() {
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
}

inline bool HasAvx512() {
#ifdef DYNAMO_MOE_NARROW  // So that tests run the narrow loops.
  return false;
#else
  return HasAvx2() && __builtin_cpu_supports("avx512f") != 0 &&
         __builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
         __builtin_cpu_supports("avx512vl") != 0;
#endif
}
#endif

// Calls a function that is always inlined with the lanes of its vectors as a constant.
template <typename Loop>
void ForCpu(const Loop& loop) {
#if defined(__x86_64__) && !defined(__clang__)
  if (HasAvx512()) {
    return RunForAvx512(loop);
  }
  if (HasAvx2()) {
    return RunForAvx2(loop);
  }
#endif
  loop(std::integral_constant<std::int64_t, kLanes>{});
}

}  // namespace dynamo_moe::onnxruntime
