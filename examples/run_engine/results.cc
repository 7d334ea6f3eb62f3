#include "results.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>

namespace run_engine {
namespace {

template <typename Stored, typename ToDouble>
std::vector<double> decode_as(const std::vector<std::byte>& data, ToDouble to_double) {
  std::vector<double> values(data.size() / sizeof(Stored));
  for (std::size_t at = 0; at < values.size(); ++at) {
    Stored stored;
    std::memcpy(&stored, data.data() + at * sizeof(Stored), sizeof(Stored));
    values[at] = to_double(stored);
  }
  return values;
}

double from_float16(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  double value = 0;
  if (exponent == 31) {
    value = fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                          : std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    value = std::ldexp(fraction, -24);
  } else {
    value = std::ldexp(1024 + fraction, exponent - 25);
  }
  return (bits >> 15) != 0 ? -value : value;
}

double from_bfloat16(std::uint16_t bits) {
  // The upper half of a float32.
  const std::uint32_t wide = std::uint32_t{bits} << 16;
  float value = 0;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

template <typename Stored>
std::vector<std::byte> encode_as(const std::vector<std::int64_t>& values) {
  std::vector<std::byte> data(values.size() * sizeof(Stored));
  for (std::size_t at = 0; at < values.size(); ++at) {
    const auto stored = static_cast<Stored>(values[at]);
    std::memcpy(data.data() + at * sizeof(Stored), &stored, sizeof(Stored));
  }
  return data;
}

// Floats whose exponent says 0.5 to 1, with a random sign and fraction.
template <typename Bits>
void fill(std::vector<std::byte>& data, int fraction_bits, Bits half) {
  std::mt19937 random(0);  // NOLINT(bugprone-random-generator-seed): the same in every run
  const Bits sign = Bits{1} << (sizeof(Bits) * 8 - 1);
  const Bits varying = static_cast<Bits>(sign | ((Bits{1} << fraction_bits) - 1));
  for (std::size_t at = 0; at + sizeof(Bits) <= data.size(); at += sizeof(Bits)) {
    const Bits bits = static_cast<Bits>(half | (static_cast<Bits>(random()) & varying));
    std::memcpy(data.data() + at, &bits, sizeof bits);
  }
}

}  // namespace

std::size_t bytes_of(Format format) {
  switch (format) {
    case Format::kInt64:
      return 8;
    case Format::kFloat32:
    case Format::kInt32:
      return 4;
    case Format::kFloat16:
    case Format::kBfloat16:
      return 2;
    case Format::kInt8:
    case Format::kUint8:
    case Format::kBool:
      return 1;
  }
  throw std::invalid_argument("unknown format");
}

const char* name_of(Format format) {
  switch (format) {
    case Format::kFloat32:
      return "float32";
    case Format::kFloat16:
      return "float16";
    case Format::kBfloat16:
      return "bfloat16";
    case Format::kInt64:
      return "int64";
    case Format::kInt32:
      return "int32";
    case Format::kInt8:
      return "int8";
    case Format::kUint8:
      return "uint8";
    case Format::kBool:
      return "bool";
  }
  throw std::invalid_argument("unknown format");
}

std::vector<double> decode(Format format, const std::vector<std::byte>& data) {
  const auto as_it_is = [](auto value) { return static_cast<double>(value); };
  switch (format) {
    case Format::kFloat32:
      return decode_as<float>(data, as_it_is);
    case Format::kFloat16:
      return decode_as<std::uint16_t>(data, from_float16);
    case Format::kBfloat16:
      return decode_as<std::uint16_t>(data, from_bfloat16);
    case Format::kInt64:
      return decode_as<std::int64_t>(data, as_it_is);
    case Format::kInt32:
      return decode_as<std::int32_t>(data, as_it_is);
    case Format::kInt8:
      return decode_as<std::int8_t>(data, as_it_is);
    case Format::kUint8:
    case Format::kBool:
      return decode_as<std::uint8_t>(data, as_it_is);
  }
  throw std::invalid_argument("unknown format");
}

std::vector<std::byte> encode(Format format, const std::vector<std::int64_t>& values) {
  switch (format) {
    case Format::kInt64:
      return encode_as<std::int64_t>(values);
    case Format::kInt32:
      return encode_as<std::int32_t>(values);
    default:
      throw std::invalid_argument(std::string("ids and masks are int64 or int32, got ") +
                                  name_of(format));
  }
}

std::vector<std::byte> example_values(Format format, std::size_t count) {
  std::vector<std::byte> data(count * bytes_of(format));
  if (format == Format::kFloat32) {
    fill<std::uint32_t>(data, 23, 0x3F000000);
  } else if (format == Format::kFloat16) {
    fill<std::uint16_t>(data, 10, 0x3800);
  } else if (format == Format::kBfloat16) {
    fill<std::uint16_t>(data, 7, 0x3F00);
  }
  return data;
}

std::vector<Ranked> largest(const double* row, std::size_t size, std::size_t count) {
  std::vector<std::size_t> order(size);
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto before = [row](std::size_t a, std::size_t b) {
    if (std::isnan(row[a]) || std::isnan(row[b])) {
      return !std::isnan(row[a]) || (std::isnan(row[b]) && a < b);
    }
    return row[a] > row[b] || (row[a] == row[b] && a < b);
  };
  count = std::min(count, size);
  const auto end = order.begin() + static_cast<std::ptrdiff_t>(count);
  std::partial_sort(order.begin(), end, order.end(), before);
  std::vector<Ranked> ranked;
  ranked.reserve(count);
  std::transform(order.begin(), end, std::back_inserter(ranked),
                 [row](std::size_t index) { return Ranked{index, row[index]}; });
  return ranked;
}

Latency summarize(std::vector<double> times) {
  if (times.empty()) {
    throw std::invalid_argument("no times to summarize");
  }
  std::sort(times.begin(), times.end());
  const std::size_t size = times.size();
  const double mean = std::accumulate(times.begin(), times.end(), 0.0) / static_cast<double>(size);
  const double median = (times[(size - 1) / 2] + times[size / 2]) / 2;
  const double p99 = times[(size * 99 + 99) / 100 - 1];
  return {mean, median, p99};
}

}  // namespace run_engine
