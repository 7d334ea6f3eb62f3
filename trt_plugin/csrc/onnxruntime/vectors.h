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

template <std::int64_t Lanes>
DYNAMO_MOE_INLINE Floats<Lanes> Read(const float* numbers) {
  Floats<Lanes> vector;
  std::memcpy(&vector, numbers, sizeof(vector));
  return vector;
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

// The numbers at some places of two vectors one after the other.
template <std::int64_t Lanes>
DYNAMO_MOE_INLINE Floats<Lanes> At(const Floats<Lanes>& first, const Floats<Lanes>& second,
                                   const Integers<Lanes>& places) {
#ifdef __clang__
  Floats<Lanes> found = {};
  for (std::int64_t i = 0; i < Lanes; ++i) {
    const std::int32_t place = places[i] & (2 * Lanes - 1);
    found[i] = place < Lanes ? first[place] : second[place - Lanes];
  }
  return found;
#else
  return __builtin_shuffle(first, second, places);
#endif
}

// 0, 1, 2, …
template <std::int64_t Lanes>
DYNAMO_MOE_INLINE constexpr Integers<Lanes> Places() {
  if constexpr (Lanes == kWideLanes) {
    return Integers<Lanes>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  } else {
    return Integers<Lanes>{0, 1, 2, 3, 4, 5, 6, 7};
  }
}

// Adds the last half to the first, and so on, until so many sums are left in front.
template <std::int64_t Left, std::int64_t Lanes>
DYNAMO_MOE_INLINE Floats<Lanes> Fold(const Floats<Lanes>& numbers) {
  Floats<Lanes> sum = numbers;
  for (std::int32_t half = Lanes / 2; half >= Left; half /= 2) {
    sum += At<Lanes>(sum, Places<Lanes>() + half);
  }
  return sum;
}

template <std::int64_t Lanes>
DYNAMO_MOE_INLINE float Sum(const Floats<Lanes>& numbers) {
  return Fold<1, Lanes>(numbers)[0];
}

// The sums of two vectors' neighbours: pairs of the first and of the second in turn.
template <std::int64_t Length, std::int64_t Lanes>
DYNAMO_MOE_INLINE Floats<Lanes> AddNeighbours(const Floats<Lanes>& first,
                                              const Floats<Lanes>& second) {
  const Integers<Lanes> all = Places<Lanes>();
  // Runs of a length: every other one of the first vector, and the same of the second between them.
  const Integers<Lanes> in_second = (all / Length) % 2;
  const Integers<Lanes> even = all - in_second * Length + in_second * Lanes;
  return At<Lanes>(first, second, even) + At<Lanes>(first, second, even + Length);
}

// The sum of each vector.
template <std::int64_t Lanes>
DYNAMO_MOE_INLINE void SumEach(const Floats<Lanes> (&numbers)[1], float (&sums)[1]) {
  sums[0] = Sum<Lanes>(numbers[0]);
}

template <std::int64_t Lanes>
DYNAMO_MOE_INLINE void SumEach(const Floats<Lanes> (&numbers)[4], float (&sums)[4]) {
  const auto first = AddNeighbours<1, Lanes>(numbers[0], numbers[1]);
  const auto second = AddNeighbours<1, Lanes>(numbers[2], numbers[3]);
  const auto folded = Fold<4, Lanes>(AddNeighbours<2, Lanes>(first, second));
  std::memcpy(sums, &folded, sizeof(sums));
}

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

// Bits of the widest vectors for which loops are compiled; tests compile them for narrower ones.
#ifndef DYNAMO_MOE_WIDEST
#define DYNAMO_MOE_WIDEST 512
#endif

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
  return HasAvx2() && __builtin_cpu_supports("avx512f") != 0 &&
         __builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
         __builtin_cpu_supports("avx512vl") != 0;
}
#endif

// Calls a function that is always inlined with the lanes of its vectors as a constant.
template <typename Loop>
void ForCpu(const Loop& loop) {
#if defined(__x86_64__) && !defined(__clang__)
  if constexpr (DYNAMO_MOE_WIDEST >= 512) {
    if (HasAvx512()) {
      return RunForAvx512(loop);
    }
  }
  if constexpr (DYNAMO_MOE_WIDEST >= 256) {
    if (HasAvx2()) {
      return RunForAvx2(loop);
    }
  }
#endif
  loop(std::integral_constant<std::int64_t, kLanes>{});
}

}  // namespace dynamo_moe::onnxruntime
