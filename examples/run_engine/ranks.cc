#include "ranks.h"

#include <dlfcn.h>

#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <thread>

#include "options.h"

namespace run_engine {
namespace {

constexpr const char* kNccl = "libnccl.so.2";
// TensorRT takes 2.19 to below 3.
constexpr int kOldest = 21900;
constexpr int kTooNew = 30000;

// Environment variables of a launcher.
struct Launcher {
  const char* rank;
  const char* ranks;
  const char* local;
};

constexpr Launcher kLaunchers[] = {
    {"RANK", "WORLD_SIZE", "LOCAL_RANK"},                                            // torchrun
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},  // Open MPI
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},       // MPICH and Intel MPI
    {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"}  // srun
};

std::optional<int> number(const char* variable, int smallest) {
  const char* text = std::getenv(variable);
  if (text == nullptr) {
    return std::nullopt;
  }
  int value = 0;
  const char* end = text + std::strlen(text);
  const auto [stopped, error] = std::from_chars(text, end, value);
  if (error != std::errc{} || stopped != end || value < smallest) {
    throw UsageError(std::string(variable) + " must be a number of at least " +
                     std::to_string(smallest) + ", got \"" + text + '"');
  }
  return value;
}

// ncclUniqueId, as NCCL's public header has it.
struct UniqueId {
  char internal[128];
};

template <typename Function>
Function function(void* library, const char* name) {
  auto* found = reinterpret_cast<Function>(dlsym(library, name));
  if (found == nullptr) {
    throw std::runtime_error(std::string(kNccl) + " has no " + name);
  }
  return found;
}

// A library that stays open until the process ends: NCCL has threads.
void* open_nccl() {
  void* library = dlopen(kNccl, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw std::runtime_error(std::string("an engine of several ranks needs NCCL, and ") +
                             dlerror());
  }
  int version = 0;
  function<int (*)(int*)>(library, "ncclGetVersion")(&version);
  if (version < kOldest || version >= kTooNew) {
    throw std::runtime_error(std::string("TensorRT needs NCCL from 2.19 to below 3; ") + kNccl +
                             " has the version code " + std::to_string(version));
  }
  return library;
}

void check(void* library, int result, const char* name) {
  if (result != 0) {
    const auto text = function<const char* (*)(int)>(library, "ncclGetErrorString");
    throw std::runtime_error(std::string("NCCL's ") + name + " failed: " + text(result));
  }
}

// The file of the id, as long as rank 0 needs it.
class IdFile {
 public:
  IdFile(const std::filesystem::path& path, const UniqueId& id) : path_(path) {
    if (std::filesystem::exists(path)) {
      throw UsageError(path.string() + " is there already: remove what an earlier run has left");
    }
    // Renamed, so that no rank reads a part of it.
    const std::filesystem::path part = path.string() + ".part";
    std::ofstream file(part, std::ios::binary);
    file.write(id.internal, sizeof(id.internal));
    file.close();
    if (!file) {
      throw std::runtime_error("cannot write " + part.string());
    }
    std::filesystem::rename(part, path);
  }
  ~IdFile() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  IdFile(const IdFile&) = delete;
  IdFile& operator=(const IdFile&) = delete;

 private:
  std::filesystem::path path_;
};

UniqueId await_id(const std::string& path, int seconds) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  for (;;) {
    UniqueId id{};
    std::ifstream file(path, std::ios::binary);
    if (file.read(id.internal, sizeof(id.internal))) {
      return id;
    }
    if (std::chrono::steady_clock::now() >= until) {
      throw std::runtime_error("rank 0 has left no id of NCCL in " + path + " within " +
                               std::to_string(seconds) + " s");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

}  // namespace

Place place_of_process() {
  for (const Launcher& launcher : kLaunchers) {
    const std::optional<int> rank = number(launcher.rank, 0);
    if (!rank) {
      continue;
    }
    const std::optional<int> ranks = number(launcher.ranks, 1);
    if (!ranks || *rank >= *ranks) {
      throw UsageError(std::string(launcher.rank) + " is " + std::to_string(*rank) + ", but " +
                       launcher.ranks + (ranks ? " is " + std::to_string(*ranks) : " is not set"));
    }
    return {*rank, *ranks, number(launcher.local, 0).value_or(-1)};
  }
  std::string names;
  for (const Launcher& launcher : kLaunchers) {
    names += (names.empty() ? "" : ", ") + std::string(launcher.rank);
  }
  throw UsageError("--nccl-id needs a launcher such as torchrun or mpirun: none of " + names +
                   " is set");
}

std::string rank_path(const std::string& path, int rank) {
  const std::filesystem::path whole(path);
  const std::string name = whole.stem().string() + ".rank" + std::to_string(rank);
  return (whole.parent_path() / (name + whole.extension().string())).string();
}

Communicator::Communicator(const Place& place, const std::string& id_file, int wait_seconds) {
  void* nccl = open_nccl();
  const auto init = function<int (*)(void**, int, UniqueId, int)>(nccl, "ncclCommInitRank");
  destroy_ = function<int (*)(void*)>(nccl, "ncclCommDestroy");
  // NCCL returns once all ranks have joined, so all have read the file.
  std::optional<IdFile> file;
  UniqueId id{};
  if (place.rank == 0) {
    const auto get_id = function<int (*)(UniqueId*)>(nccl, "ncclGetUniqueId");
    check(nccl, get_id(&id), "ncclGetUniqueId");
    file.emplace(id_file, id);
  } else {
    id = await_id(id_file, wait_seconds);
  }
  check(nccl, init(&communicator_, place.ranks, id, place.rank), "ncclCommInitRank");
}

Communicator::~Communicator() {
  if (communicator_ != nullptr) {
    // A destructor cannot report.
    static_cast<void>(destroy_(communicator_));
  }
}

}  // namespace run_engine
