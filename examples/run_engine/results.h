// What is computed of an engine's results on the host: values of any dtype, the largest of a row,
// and a summary of latencies. Includes only the standard library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace run_engine {

enum class Format { kFloat32, kFloat16, kBfloat16, kInt64, kInt32, kInt8, kUint8, kBool };

std::size_t bytes_of(Format format);
const char* name_of(Format format);

// The values of `data`, whose size is a multiple of the format's.
std::vector<double> decode(Format format, const std::vector<std::byte>& data);

// The content of an int64 or int32 tensor with these values.
std::vector<std::byte> encode(Format format, const std::vector<std::int64_t>& values);

// Values for an input that no file gives: of magnitude 0.5 to 1 and random sign for floats, zeros
// otherwise, which are valid as ids and as masks. The same in every run.
std::vector<std::byte> example_values(Format format, std::size_t count);

struct Ranked {
  std::size_t index;
  double value;
};

// The largest values of `row`, in descending order; the first of equal ones comes first. NaN counts
// as the smallest.
std::vector<Ranked> largest(const double* row, std::size_t size, std::size_t count);

struct Latency {
  double mean;
  double median;
  double p99;
};

// Throws std::invalid_argument if there are no times. p99 is the smallest time that 99 % of them do
// not exceed.
Latency summarize(std::vector<double> times);

}  // namespace run_engine
