// An engine that several GPUs compute together: which rank this process is, and its communicator.
#pragma once

#include <string>

namespace run_engine {

struct Place {
  int rank;
  int ranks;
  // The rank among those of this machine; -1: the launcher does not say.
  int local;
};

// This process's place, as torchrun, mpirun or srun says. Throws a UsageError if none does.
Place place_of_process();

// The file of a rank: that of rank 1 of "model.engine" is "model.rank1.engine".
std::string rank_path(const std::string& path, int rank);

// NCCL's communicator of all ranks, made with the current CUDA device. NCCL is opened at run time,
// and never linked.
class Communicator {
 public:
  // Rank 0 gives NCCL's id to the others by a file, beside which each of them has one of its own.
  // Throws if not all are there in time.
  Communicator(const Place& place, const std::string& id_file, int wait_seconds);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // An ncclComm_t.
  [[nodiscard]] void* get() const { return communicator_; }

 private:
  void* communicator_ = nullptr;
  int (*destroy_)(void*) = nullptr;
};

}  // namespace run_engine
