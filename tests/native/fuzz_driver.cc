// Runs a fuzz target where the compiler has no libFuzzer: mutates real inputs, without feedback.
//
// Arguments: seconds, a seed for random numbers, input files. First, small inputs are truncated at
// every byte, changed in every bit and given a number that tends to break arithmetic in every
// field. Then random mixtures of such changes are made for the given time.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments);
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

// A larger input would take minutes: the time grows with the square of the size.
constexpr std::size_t kSmall = 4096;

std::size_t runs = 0;

void Run(const std::string& input) {
  ++runs;
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(input.data()), input.size());
}

// Numbers that tend to break arithmetic on counts, offsets and indices.
template <typename Field>
std::vector<Field> StrangeNumbers() {
  constexpr Field kMost = std::numeric_limits<Field>::max();
  return {0, 1, 7, kMost / 2, kMost / 2 + 1, kMost - 63, kMost};
}

template <typename Field>
void RunStrangeNumbers(const std::string& input) {
  for (std::size_t at = 0; at + sizeof(Field) <= input.size(); at += sizeof(Field)) {
    for (const Field value : StrangeNumbers<Field>()) {
      std::string changed = input;
      std::memcpy(changed.data() + at, &value, sizeof(value));
      Run(changed);
    }
  }
}

void RunSystematically(const std::string& input) {
  for (std::size_t size = 0; size <= input.size(); ++size) {
    Run(input.substr(0, size));
  }
  Run(input + "x");
  for (std::size_t at = 0; at < input.size(); ++at) {
    std::string changed = input;
    changed[at] = static_cast<char>(changed[at] ^ (1U << (at % 8)));
    Run(changed);
  }
  RunStrangeNumbers<std::uint32_t>(input);
  RunStrangeNumbers<std::uint64_t>(input);
}

class Mutator {
 public:
  explicit Mutator(unsigned seed) : random_(seed) {}

  std::size_t Below(std::size_t limit) {
    return std::uniform_int_distribution<std::size_t>(0, limit - 1)(random_);
  }

  void Mutate(std::string* input) {
    for (std::size_t changes = 1 + Below(6); changes > 0 && !input->empty(); --changes) {
      const std::size_t at = Below(input->size());
      const std::size_t length = 1 + Below(64);
      switch (Below(8)) {
        case 0:
          input->resize(at);
          break;
        case 1:
          input->erase(at, length);
          break;
        case 2:
          input->insert(at, length, '\0');
          break;
        case 3:
          input->replace(at, length, input->substr(Below(input->size()), length));
          break;
        case 4:
          (*input)[at] = static_cast<char>(Below(256));
          break;
        case 5:
          Write<std::uint64_t>(input, at);
          break;
        default:
          Write<std::uint32_t>(input, at);
          break;
      }
    }
  }

 private:
  template <typename Field>
  void Write(std::string* input, std::size_t at) {
    at -= at % sizeof(Field);
    if (at + sizeof(Field) <= input->size()) {
      const std::vector<Field> numbers = StrangeNumbers<Field>();
      std::memcpy(input->data() + at, &numbers[Below(numbers.size())], sizeof(Field));
    }
  }

  std::mt19937 random_;
};

}  // namespace

int main(int count, char** arguments) {
  if (count < 4) {
    std::fprintf(stderr, "usage: %s SECONDS SEED FILE...\n", arguments[0]);
    return 2;
  }
  LLVMFuzzerInitialize(&count, &arguments);
  std::vector<std::string> inputs;
  for (int i = 3; i < count; ++i) {
    std::ifstream file(arguments[i], std::ios::binary);
    inputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    if (!file || inputs.back().empty()) {
      std::fprintf(stderr, "%s cannot be read, or is empty\n", arguments[i]);
      return 2;
    }
    if (inputs.back().size() <= kSmall) {
      RunSystematically(inputs.back());
    }
  }
  std::printf("%zu systematic runs\n", runs);
  Mutator mutator(static_cast<unsigned>(std::strtoul(arguments[2], nullptr, 10)));
  const auto end = std::chrono::steady_clock::now() +
                   std::chrono::seconds(std::strtol(arguments[1], nullptr, 10));
  runs = 0;
  while (std::chrono::steady_clock::now() < end) {
    std::string input = inputs[mutator.Below(inputs.size())];
    mutator.Mutate(&input);
    Run(input);
  }
  std::printf("%zu random runs\n", runs);
  return 0;
}
