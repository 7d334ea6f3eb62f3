#include "generation.h"

#include <algorithm>
#include <chrono>
#include <iomanip>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda.h"
#include "engine.h"
#include "results.h"
#include "text.h"

namespace run_engine {
namespace {

const std::string kPast = "past_key_values.";
const std::string kPresent = "present.";
const std::string kMask = "attention_mask";
// How many tokens are in a cache of a fixed length.
const std::string kPastLength = "past_sequence_length";

using Shapes = std::map<std::string, Shape>;

// What an engine keeps between calls: an input, and the output that is the next call's input. They
// take turns in two buffers, so that nothing is copied; or one is updated in place.
struct Kept {
  Tensor past;
  Tensor present;
  Buffer read;
  Buffer write;
  bool is_updated;
};

bool begins_with(const std::string& text, const std::string& prefix) {
  return text.compare(0, prefix.size(), prefix) == 0;
}

std::int64_t signed_size(std::size_t size) { return static_cast<std::int64_t>(size); }

// A cache's sizes with so many tokens: the batch comes first, and any other size that is not fixed
// counts tokens. States have none.
Shape sized(Shape shape, std::size_t batch, std::size_t tokens) {
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    if (shape[axis] < 0) {
      shape[axis] = signed_size(axis == 0 ? batch : tokens);
    }
  }
  return shape;
}

// A profile's reason not to take the shapes; empty: it takes them.
std::string refusal(const Engine& engine, const Shapes& shapes, std::int32_t profile) {
  for (const auto& [name, shape] : shapes) {
    const Shape smallest = engine.profile_shape(name, profile, nvinfer1::OptProfileSelector::kMIN);
    const Shape largest = engine.profile_shape(name, profile, nvinfer1::OptProfileSelector::kMAX);
    bool fits = smallest.size() == shape.size();
    for (std::size_t axis = 0; fits && axis < shape.size(); ++axis) {
      fits = smallest[axis] <= shape[axis] && shape[axis] <= largest[axis];
    }
    if (!fits) {
      return name + ' ' + to_text(shape) + " is not in profile " + std::to_string(profile) + ", " +
             to_text(smallest) + " to " + to_text(largest);
    }
  }
  return {};
}

std::int32_t profile_for(const Engine& engine, const Shapes& shapes) {
  std::string refusals;
  for (std::int32_t profile = 0; profile < engine.profiles(); ++profile) {
    const std::string reason = refusal(engine, shapes, profile);
    if (reason.empty()) {
      return profile;
    }
    refusals += (refusals.empty() ? "" : "; ") + reason;
  }
  throw UsageError("the engine was not built for this text: " + refusals);
}

// An engine of a language model, and what it has kept of the text so far.
class LanguageModel {
 public:
  // `longest`: the most tokens that a row of the text has when the engine runs.
  LanguageModel(const Options& options, std::size_t batch, std::size_t longest,
                cudaStream_t stream);

  // The most likely token after each row.
  std::vector<std::int64_t> next(const Text& text);

 private:
  [[nodiscard]] const Tensor* find(const std::string& name, bool is_input) const;
  void check_tensors() const;
  void keep(const Tensor& past, std::size_t batch, std::size_t longest);
  // Copies an input to the device, if the engine has it.
  void feed(const std::string& name, const std::vector<std::int64_t>& values, const Shape& shape);
  void set_shapes();
  void bind();
  [[nodiscard]] std::vector<std::int64_t> most_likely() const;

  cudaStream_t stream_;
  Engine engine_;
  std::int32_t profile_ = -1;
  // Tokens of each row that the engine has seen.
  std::size_t seen_ = 0;
  // Tokens that a cache of a fixed length has room for; 0: it grows.
  std::size_t room_ = 0;
  // Of a call's inputs.
  Shapes shapes_;
  std::map<std::string, Buffer> fed_;
  std::vector<Kept> kept_;
  Tensor logits_;
  Buffer logits_memory_;
};

LanguageModel::LanguageModel(const Options& options, std::size_t batch, std::size_t longest,
                             cudaStream_t stream)
    : stream_(stream), engine_(options) {
  check_tensors();
  logits_ = *find("logits", false);
  const Tensor* mask = find(kMask, true);
  if (find(kPastLength, true) != nullptr && mask != nullptr && mask->shape.back() > 0) {
    room_ = static_cast<std::size_t>(mask->shape.back());
    if (longest > room_) {
      throw UsageError("the engine's cache has room for " + std::to_string(room_) +
                       " tokens, but the text may have " + std::to_string(longest));
    }
  }
  if (mask != nullptr) {
    // The longest call is the last one: better no text than half of one.
    const std::size_t columns = room_ == 0 ? longest : room_;
    profile_for(engine_, {{kMask, {signed_size(batch), signed_size(columns)}}});
  }
  for (const Tensor& tensor : engine_.tensors()) {
    if (tensor.is_input && begins_with(tensor.name, kPast)) {
      keep(tensor, batch, longest);
    }
  }
}

const Tensor* LanguageModel::find(const std::string& name, bool is_input) const {
  const auto& tensors = engine_.tensors();
  const auto found = std::find_if(tensors.begin(), tensors.end(), [&](const Tensor& each) {
    return each.is_input == is_input && each.name == name;
  });
  return found == tensors.end() ? nullptr : &*found;
}

void LanguageModel::check_tensors() const {
  for (const Tensor& tensor : engine_.tensors()) {
    const std::string& name = tensor.name;
    const bool is_known =
        tensor.is_input
            ? name == "input_ids" || name == kMask || name == "position_ids" ||
                  name == kPastLength || begins_with(name, kPast)
            : name == "logits" || (begins_with(name, kPresent) &&
                                   find(kPast + name.substr(kPresent.size()), true) != nullptr);
    if (!is_known) {
      throw UsageError("--prompt cannot run an engine with the " +
                       std::string(tensor.is_input ? "input " : "output ") + name);
    }
  }
  const Tensor* logits = find("logits", false);
  if (find("input_ids", true) == nullptr || logits == nullptr || logits->shape.size() != 3) {
    throw UsageError(
        "--prompt needs an engine with the input input_ids and the output logits, of 3 dimensions");
  }
}

void LanguageModel::keep(const Tensor& past, std::size_t batch, std::size_t longest) {
  const std::string name = kPresent + past.name.substr(kPast.size());
  const Tensor* present = find(name, false);
  if (present == nullptr || present->format != past.format) {
    throw UsageError("the engine has the input " + past.name + ", but no output " + name +
                     " of the same dtype");
  }
  Kept kept{past, *present, {}, {}, engine_.updated_input(name) == past.name};
  // Memory for the longest call, so that none is allocated between tokens.
  kept.past.shape = sized(past.shape, batch, longest);
  kept.read.reserve(kept.past.bytes());
  if (!kept.is_updated) {
    kept.write.reserve(kept.past.bytes());
  }
  kept.read.fill_with_zeros(stream_);
  kept.past.shape = sized(past.shape, batch, 0);
  kept_.push_back(std::move(kept));
}

std::vector<std::int64_t> LanguageModel::next(const Text& text) {
  // Without a cache, the whole text is computed anew.
  const std::size_t begin = kept_.empty() ? 0 : seen_;
  const std::int64_t rows = signed_size(text.rows());
  const std::int64_t tokens = signed_size(text.length() - begin);
  const std::size_t columns = room_ == 0 ? text.length() : room_;
  feed("input_ids", text.ids(begin), {rows, tokens});
  feed("position_ids", text.positions(begin), {rows, tokens});
  feed(kMask, text.mask(columns), {rows, signed_size(columns)});
  feed(kPastLength, {signed_size(begin)}, {1});
  set_shapes();
  bind();
  engine_.enqueue(stream_);
  for (Kept& kept : kept_) {
    kept.past.shape = kept.present.shape;
    if (!kept.is_updated) {
      std::swap(kept.read, kept.write);
    }
  }
  seen_ = text.length();
  return most_likely();
}

void LanguageModel::feed(const std::string& name, const std::vector<std::int64_t>& values,
                         const Shape& shape) {
  const Tensor* tensor = find(name, true);
  if (tensor == nullptr) {
    return;
  }
  const std::vector<std::byte> content = encode(tensor->format, values);
  copy(fed_[name].reserve(content.size()), content.data(), content.size(), cudaMemcpyHostToDevice,
       stream_);
  shapes_[name] = shape;
}

void LanguageModel::set_shapes() {
  for (const Kept& kept : kept_) {
    shapes_[kept.past.name] = kept.past.shape;
  }
  const std::int32_t profile = profile_for(engine_, shapes_);
  if (profile != profile_) {
    engine_.select_profile(profile, stream_);
    profile_ = profile;
  }
  for (const auto& [name, shape] : shapes_) {
    engine_.set_shape(name, shape);
  }
}

void LanguageModel::bind() {
  for (const auto& [name, buffer] : fed_) {
    engine_.set_address(name, buffer.get());
  }
  for (Kept& kept : kept_) {
    kept.present.shape = engine_.shape(kept.present.name);
    engine_.set_address(kept.past.name, kept.read.get());
    engine_.set_address(kept.present.name, kept.is_updated
                                               ? kept.read.get()
                                               : kept.write.reserve(kept.present.bytes()));
  }
  logits_.shape = engine_.shape(logits_.name);
  engine_.set_address(logits_.name, logits_memory_.reserve(logits_.bytes()));
}

std::vector<std::int64_t> LanguageModel::most_likely() const {
  // [B, S, V], of which the last token's go to the host.
  const auto batch = static_cast<std::size_t>(logits_.shape.front());
  const auto width = static_cast<std::size_t>(logits_.shape.back());
  const auto* all = static_cast<const std::byte*>(logits_memory_.get());
  std::vector<std::byte> last(width * bytes_of(logits_.format));
  std::vector<std::int64_t> tokens;
  for (std::size_t row = 1; row <= batch; ++row) {
    const std::byte* from = all + row * (logits_.bytes() / batch) - last.size();
    copy(last.data(), from, last.size(), cudaMemcpyDeviceToHost, stream_);
    const std::vector<double> values = decode(logits_.format, last);
    tokens.push_back(signed_size(largest(values.data(), width, 1).front().index));
  }
  return tokens;
}

void print_latency(const std::vector<double>& times) {
  std::cout << std::fixed << std::setprecision(3) << "latency     first token " << times.front()
            << " ms";
  if (times.size() > 1) {
    const Latency latency = summarize({times.begin() + 1, times.end()});
    std::cout << ", each further one mean " << latency.mean << " ms, median " << latency.median
              << " ms, p99 " << latency.p99 << " ms (" << times.size() - 1 << " runs)";
  }
  std::cout << '\n';
}

}  // namespace

void generate(const Options& options) {
  Text text(options.prompts, options.ends);
  const auto steps = static_cast<std::size_t>(options.steps);
  const Stream stream = make_stream();
  // The last token is written, and not read.
  LanguageModel model(options, text.rows(), text.length() + steps - 1, stream.get());
  std::vector<double> times;
  while (times.size() < steps && !text.has_ended()) {
    const auto began = std::chrono::steady_clock::now();
    text.append(model.next(text));
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - began;
    times.push_back(time.count());
  }
  for (std::size_t row = 0; row < text.rows(); ++row) {
    std::cout << "row " << row << ':';
    for (const std::int64_t id : text.written(row)) {
      std::cout << ' ' << id;
    }
    std::cout << '\n';
  }
  print_latency(times);
}

}  // namespace run_engine
