#include "ranks.h"

#include <dlfcn.h>

#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

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

// How the ranks of one run find each other by files, whatever earlier runs have left there.
//
// Each rank draws a number. Rank 0 writes its own, and the others answer with theirs and the one
// that they have read. Once all have answered to its own number, rank 0 writes the id with their
// numbers behind it, and a rank takes an id only with its own. So no rank takes what another run
// has left, and none begins before all are there.
class Meeting {
 public:
  Meeting(std::string path, const Place& place, int seconds)
      : path_(std::move(path)),
        place_(place),
        seconds_(seconds),
        until_(std::chrono::steady_clock::now() + std::chrono::seconds(seconds)),
        own_(drawn()) {}
  // Of a rank that fails, too: the others then wait for it in vain, and not with NCCL.
  ~Meeting() {
    std::error_code ignored;
    std::filesystem::remove(path_of(place_.rank), ignored);
  }
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  // Rank 0 gives the id to all others.
  void give(const UniqueId& id) const {
    write(own_);
    std::string given(id.internal, sizeof(id.internal));
    for (int rank = 1; rank < place_.ranks; ++rank) {
      std::string answer;
      while (answer.size() != own_.size() + kDrawn || answer.compare(0, own_.size(), own_) != 0) {
        wait("rank " + std::to_string(rank) + " has not answered in " + path_of(rank));
        answer = read(rank);
      }
      given += answer.substr(own_.size());
    }
    write(given);
  }

  // The others take it.
  [[nodiscard]] UniqueId take() const {
    UniqueId id{};
    const size_t begin = sizeof(id.internal) + (place_.rank - 1) * kDrawn;
    std::string answered;
    for (;;) {
      const std::string said = read(0);
      if (said.size() >= begin + kDrawn && said.compare(begin, kDrawn, own_) == 0) {
        std::memcpy(id.internal, said.data(), sizeof(id.internal));
        return id;
      }
      if (said.size() == kDrawn && said != answered) {
        write(said + own_);
        answered = said;
      }
      wait("rank 0 has left no id of NCCL for all ranks in " + path_of(0));
    }
  }

 private:
  static constexpr size_t kDrawn = 16;

  static std::string drawn() {
    std::random_device device;
    std::string number;
    while (number.size() < kDrawn) {
      const std::random_device::result_type some = device();
      number.append(reinterpret_cast<const char*>(&some), sizeof(some));
    }
    return number;
  }

  [[nodiscard]] std::string path_of(int rank) const {
    return rank == 0 ? path_ : path_ + ".rank" + std::to_string(rank);
  }

  [[nodiscard]] std::string read(int rank) const {
    std::ifstream file(path_of(rank), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  // Renamed, so that no rank reads a part of it.
  void write(const std::string& text) const {
    const std::string part = path_of(place_.rank) + ".part";
    std::ofstream file(part, std::ios::binary);
    file.write(text.data(), static_cast<std::streamsize>(text.size()));
    file.close();
    if (!file) {
      throw std::runtime_error("cannot write " + part);
    }
    std::filesystem::rename(part, path_of(place_.rank));
  }

  void wait(const std::string& missing) const {
    if (std::chrono::steady_clock::now() >= until_) {
      throw std::runtime_error(missing + " within " + std::to_string(seconds_) + " s");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }

  std::string path_;
  Place place_;
  int seconds_;
  std::chrono::steady_clock::time_point until_;
  std::string own_;
};

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
  // It ends when NCCL has joined all ranks, so all have read its files.
  const Meeting meeting(id_file, place, wait_seconds);
  UniqueId id{};
  if (place.rank == 0) {
    const auto get_id = function<int (*)(UniqueId*)>(nccl, "ncclGetUniqueId");
    check(nccl, get_id(&id), "ncclGetUniqueId");
    meeting.give(id);
  } else {
    id = meeting.take();
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
