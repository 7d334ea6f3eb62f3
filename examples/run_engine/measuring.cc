#include "measuring.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <iomanip>
#include <iostream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cuda.h"
#include "engine.h"
#include "results.h"

namespace run_engine {
namespace {

// Rows of an output whose largest values are printed.
constexpr std::size_t kRowsShown = 8;

struct BoundTensor : Tensor {
  void* address;
  // Empty where the address is another tensor's.
  DeviceMemory memory;
};

std::vector<std::byte> input_content(const Options& options, const Tensor& tensor) {
  const auto file = options.input_files.find(tensor.name);
  if (file == options.input_files.end()) {
    return example_values(tensor.format, tensor.elements());
  }
  std::ifstream stream(file->second, std::ios::binary | std::ios::ate);
  const std::streamoff size = stream ? static_cast<std::streamoff>(stream.tellg()) : -1;
  if (size < 0) {
    throw UsageError("cannot read " + file->second);
  }
  if (static_cast<std::size_t>(size) != tensor.bytes()) {
    throw UsageError("input " + tensor.name + " needs " + std::to_string(tensor.bytes()) +
                     " bytes, " + file->second + " has " + std::to_string(size));
  }
  std::vector<std::byte> content(tensor.bytes());
  stream.seekg(0);
  stream.read(reinterpret_cast<char*>(content.data()), size);
  if (!stream) {
    throw std::runtime_error("cannot read " + file->second);
  }
  return content;
}

void fill_inputs(const Options& options, const std::vector<BoundTensor>& tensors,
                 cudaStream_t stream) {
  for (const BoundTensor& tensor : tensors) {
    if (tensor.is_input) {
      const std::vector<std::byte> content = input_content(options, tensor);
      copy(tensor.address, content.data(), content.size(), cudaMemcpyHostToDevice, stream);
    }
  }
}

std::vector<std::byte> output_content(const BoundTensor& tensor, cudaStream_t stream) {
  std::vector<std::byte> content(tensor.bytes());
  copy(content.data(), tensor.address, content.size(), cudaMemcpyDeviceToHost, stream);
  return content;
}

void write(const std::string& path, const std::vector<std::byte>& content) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(content.data()),
             static_cast<std::streamsize>(content.size()));
  file.close();
  if (!file) {
    throw std::runtime_error("cannot write " + path);
  }
}

void print_largest(const Tensor& tensor, const std::vector<std::byte>& content, int count) {
  const std::vector<double> values = decode(tensor.format, content);
  const auto width =
      tensor.shape.empty() ? std::size_t{1} : static_cast<std::size_t>(tensor.shape.back());
  const std::size_t rows = width == 0 ? 0 : values.size() / width;
  for (std::size_t row = 0; row < std::min(rows, kRowsShown); ++row) {
    std::cout << tensor.name << " row " << row << ':';
    for (const Ranked& each :
         largest(values.data() + row * width, width, static_cast<std::size_t>(count))) {
      std::cout << "  " << each.index << ' ' << each.value;
    }
    std::cout << '\n';
  }
  if (rows > kRowsShown) {
    std::cout << "... " << rows - kRowsShown << " more rows\n";
  }
}

void print_tensor(const Tensor& tensor) {
  std::cout << (tensor.is_input ? "input   " : "output  ") << tensor.name << ' '
            << name_of(tensor.format) << ' ' << to_text(tensor.shape) << '\n';
}

// The names of `given` are inputs, or outputs, of the engine.
template <typename Value>
void check_names(const Engine& engine, const std::map<std::string, Value>& given, bool are_inputs) {
  for (const auto& [name, value] : given) {
    if (std::none_of(engine.tensors().begin(), engine.tensors().end(), [&](const Tensor& each) {
          return each.is_input == are_inputs && each.name == name;
        })) {
      throw UsageError(std::string("the engine has no ") + (are_inputs ? "input " : "output ") +
                       name);
    }
  }
}

Shape input_shape(const Options& options, const Engine& engine, const Tensor& tensor) {
  const auto given = options.shapes.find(tensor.name);
  if (given != options.shapes.end()) {
    return given->second;
  }
  Shape shape =
      engine.profile_shape(tensor.name, options.profile, nvinfer1::OptProfileSelector::kOPT);
  if (options.batch && !shape.empty() && tensor.shape[0] < 0) {
    shape[0] = *options.batch;
  }
  return shape;
}

void set_shapes(const Options& options, Engine& engine, cudaStream_t stream) {
  if (options.profile >= engine.profiles()) {
    throw UsageError("the engine has " + std::to_string(engine.profiles()) +
                     " profiles, got --profile " + std::to_string(options.profile));
  }
  check_names(engine, options.shapes, true);
  check_names(engine, options.input_files, true);
  check_names(engine, options.output_files, false);
  engine.select_profile(options.profile, stream);
  for (const Tensor& tensor : engine.tensors()) {
    if (tensor.is_input) {
      engine.set_shape(tensor.name, input_shape(options, engine, tensor));
    }
  }
}

// The engine's tensors with the shapes that they have now, each in memory of its own, but for
// outputs that are inputs, updated in place.
std::vector<BoundTensor> bind_tensors(Engine& engine) {
  std::vector<BoundTensor> bound;
  std::map<std::string, void*> addresses;
  for (const bool inputs : {true, false}) {
    for (Tensor tensor : engine.tensors()) {
      if (tensor.is_input != inputs) {
        continue;
      }
      tensor.shape = engine.shape(tensor.name);
      DeviceMemory memory;
      void*& address = addresses[tensor.name];
      const auto updated = addresses.find(inputs ? "" : engine.updated_input(tensor.name));
      if (updated != addresses.end()) {
        address = updated->second;
      } else {
        memory = allocate(tensor.bytes());
        address = memory.get();
      }
      engine.set_address(tensor.name, address);
      bound.push_back({std::move(tensor), address, std::move(memory)});
    }
  }
  return bound;
}

// Milliseconds of each run on the device, and of all of them on the host.
struct Times {
  std::vector<double> runs;
  double wall;
};

Times time_runs(cudaStream_t stream, int iterations, const std::function<void()>& run) {
  std::vector<Event> events;
  events.reserve(static_cast<std::size_t>(iterations) + 1);
  for (int at = 0; at <= iterations; ++at) {
    events.push_back(make_event());
  }
  const auto began = std::chrono::steady_clock::now();
  check(cudaEventRecord(events[0].get(), stream), "cudaEventRecord");
  for (int at = 1; at <= iterations; ++at) {
    run();
    check(cudaEventRecord(events[static_cast<std::size_t>(at)].get(), stream), "cudaEventRecord");
  }
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  const std::chrono::duration<double, std::milli> wall = std::chrono::steady_clock::now() - began;
  Times times{{}, wall.count()};
  for (std::size_t at = 1; at < events.size(); ++at) {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, events[at - 1].get(), events[at].get()),
          "cudaEventElapsedTime");
    times.runs.push_back(milliseconds);
  }
  return times;
}

}  // namespace

void measure(const Options& options) {
  // Before the engine, which runs on it: it must be destroyed after it.
  const Stream stream = make_stream();
  Engine engine(options);
  set_shapes(options, engine, stream.get());
  const std::vector<BoundTensor> tensors = bind_tensors(engine);
  std::for_each(tensors.begin(), tensors.end(), print_tensor);
  fill_inputs(options, tensors, stream.get());

  const auto enqueue = [&] { engine.enqueue(stream.get()); };
  // Once before a capture: the first run loads kernels, which a capture does not permit.
  enqueue();
  check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
  GraphExec graph;
  std::function<void()> once = enqueue;
  if (options.cuda_graph) {
    graph = capture(stream.get(), enqueue);
    once = [&] { check(cudaGraphLaunch(graph.get(), stream.get()), "cudaGraphLaunch"); };
  }
  for (int at = 0; at < options.warmup; ++at) {
    once();
  }
  const Times times = time_runs(stream.get(), options.iterations, once);

  const Latency latency = summarize(times.runs);
  const auto first = std::find_if(tensors.begin(), tensors.end(),
                                  [](const Tensor& each) { return each.is_input; });
  const double batch = first == tensors.end() || first->shape.empty()
                           ? 1
                           : static_cast<double>(first->shape.front());
  std::cout << std::fixed << std::setprecision(3) << "latency     mean " << latency.mean
            << " ms, median " << latency.median << " ms, p99 " << latency.p99 << " ms ("
            << options.iterations << " runs" << (options.cuda_graph ? ", CUDA graph" : "") << ")\n"
            << std::setprecision(1) << "throughput  "
            << 1000 * batch * options.iterations / times.wall << " rows/s\n";

  std::cout << std::defaultfloat << std::setprecision(6);
  for (const BoundTensor& tensor : tensors) {
    if (tensor.is_input) {
      continue;
    }
    const std::vector<std::byte> content = output_content(tensor, stream.get());
    if (options.top_k > 0) {
      print_largest(tensor, content, options.top_k);
    }
    const auto file = options.output_files.find(tensor.name);
    if (file != options.output_files.end()) {
      write(file->second, content);
    }
  }
}

}  // namespace run_engine
