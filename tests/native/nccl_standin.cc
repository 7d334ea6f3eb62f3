// Stands in for NCCL: remembers the id that it gives, and wants it back from every rank.

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

extern "C" {

struct UniqueId {
  char internal[128];
};

struct Communicator {
  int ranks;
  int rank;
};

int ncclGetVersion(int* version) {
  const char* given = std::getenv("NCCL_STANDIN_VERSION");
  *version = given == nullptr ? 22703 : std::atoi(given);
  return 0;
}

int ncclGetUniqueId(UniqueId* id) {
  if (std::getenv("NCCL_STANDIN_NO_ID") != nullptr) {
    return 2;
  }
  std::memset(id->internal, 7, sizeof(id->internal));
  id->internal[3] = 0;  // An id is no text.
  return 0;
}

int ncclCommInitRank(Communicator** communicator, int ranks, UniqueId id, int rank) {
  for (int i = 0; i < 128; ++i) {
    if (id.internal[i] != (i == 3 ? 0 : 7)) {
      return 4;
    }
  }
  // Where ranks are processes that a test has not joined in another way, they meet in a folder.
  if (const char* folder = std::getenv("NCCL_STANDIN_FOLDER")) {
    const auto path = [&](int number) {
      return std::string(folder) + '/' + std::to_string(number);
    };
    std::ofstream(path(rank)).put('\n');
    for (int other = 0; other < ranks; ++other) {
      while (!std::ifstream(path(other))) {
        usleep(1000);
      }
    }
  }
  *communicator = new Communicator{ranks, rank};
  return 0;
}

int ncclCommDestroy(Communicator* communicator) {
  delete communicator;
  return 0;
}

const char* ncclGetErrorString(int result) {
  return result == 2 ? "unhandled system error" : "invalid argument";
}
}
