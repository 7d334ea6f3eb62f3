#include "launch/host_weights.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "bundle/checksum.h"

namespace dynamo_moe {
namespace {

constexpr const char* kFolderVariable = "DYNAMO_MOE_WEIGHTS";
constexpr std::uint64_t kAlignment = 16;
// A safetensors file begins with its header's length.
constexpr std::uint64_t kLeastHeader = 8;
constexpr std::size_t kPart = std::size_t{1} << 20;

// A file's descriptor.
class File {
 public:
  File() = default;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (descriptor_ >= 0) {
      close(descriptor_);
    }
  }

  bool Open(const std::string& path) {
    // Without waiting, if it is a pipe, for someone who writes.
    descriptor_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    return descriptor_ >= 0;
  }
  int descriptor() const { return descriptor_; }

 private:
  int descriptor_ = -1;
};

Status CannotRead(const std::string& path, const std::string& why) {
  return InvalidArgument("cannot read the experts' weights ", path, ": ", why);
}

Status ReadAt(const std::string& path, int file, std::uint64_t offset, std::size_t size, void* to) {
  auto* at = static_cast<char*>(to);
  while (size > 0) {
    const ssize_t read = pread(file, at, size, static_cast<off_t>(offset));
    if (read < 0 && errno == EINTR) {
      continue;
    }
    if (read <= 0) {
      return CannotRead(path, read == 0 ? "it has become shorter" : std::strerror(errno));
    }
    at += read;
    offset += static_cast<std::uint64_t>(read);
    size -= static_cast<std::size_t>(read);
  }
  return {};
}

std::string NameIn(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? path : path.substr(slash + 1);
}

// Opens the file in the folder of the environment if it is there, or else at its path.
Status OpenFile(const std::string& stored, File* file, std::string* path) {
  const char* const folder = std::getenv(kFolderVariable);
  if (folder != nullptr && *folder != '\0') {
    *path = Text(folder, "/", NameIn(stored));
    if (file->Open(*path)) {
      return {};
    }
    if (errno != ENOENT) {
      return CannotRead(*path, std::strerror(errno));
    }
  }
  *path = stored;
  if (file->Open(*path)) {
    return {};
  }
  return CannotRead(*path,
                    Text(std::strerror(errno), "; the environment variable ", kFolderVariable,
                         " may name another folder that has ", NameIn(stored)));
}

Status CheckFile(const WeightsSource& source, const std::string& path, int file,
                 struct stat* found) {
  constexpr const char* kAdvice =
      "the engine was built from another file: put that one back, or build the engine anew";
  if (fstat(file, found) != 0) {
    return CannotRead(path, std::strerror(errno));
  }
  if (!S_ISREG(found->st_mode)) {
    return CannotRead(path, "it is not a file");
  }
  const auto size = static_cast<std::uint64_t>(found->st_size);
  if (size != source.file_bytes) {
    return InvalidArgument("the experts' weights ", path, " must have ", source.file_bytes,
                           " bytes, got ", size, "; ", kAdvice);
  }
  Checksum checksum;
  std::vector<unsigned char> part(std::min<std::uint64_t>(kPart, source.header_bytes));
  for (std::uint64_t at = 0; at < source.header_bytes; at += part.size()) {
    part.resize(std::min<std::uint64_t>(part.size(), source.header_bytes - at));
    DYNAMO_MOE_RETURN_IF_ERROR(ReadAt(path, file, at, part.size(), part.data()));
    checksum.Add(part.data(), part.size());
  }
  if (checksum.value() != source.header_checksum) {
    return InvalidArgument("the experts' weights ", path, " have a header with checksum ",
                           Hexadecimal(checksum.value()), ", expected ",
                           Hexadecimal(source.header_checksum), "; ", kAdvice);
  }
  return {};
}

Status OpenChecked(const WeightsSource& source, File* file, std::string* path, struct stat* found) {
  DYNAMO_MOE_RETURN_IF_ERROR(OpenFile(source.path, file, path));
  return CheckFile(source, *path, file->descriptor(), found);
}

// What tells a part of a file that is not changed, in one context.
using Place = std::tuple<dev_t, ino_t, time_t, long, std::uint64_t, std::uint64_t, cuda::Context,
                         unsigned long long>;

std::mutex opening;
// Never destroyed: caches may outlive static objects.
std::map<Place, std::weak_ptr<const HostWeights>>& OpenWeights() {
  static auto* const weights = new std::map<Place, std::weak_ptr<const HostWeights>>();
  return *weights;
}

std::string LockedMemoryLimit() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return "unlimited";
  }
  return Text(limit.rlim_cur / 1024, " KiB");
}

}  // namespace

Status WeightsSource::Parse(std::string_view text, WeightsSource* source) {
  const auto wrong = [&] {
    return InvalidArgument(
        "the source of weights must be '<offset> <bytes> <file's bytes> <header's bytes> <header's "
        "checksum> <absolute path>', got '",
        text, "'");
  };
  std::string_view rest = text;
  const auto read = [&rest](auto* number, int base) {
    const std::size_t space = rest.find(' ');
    if (space == std::string_view::npos) {
      return false;
    }
    const std::string_view word = rest.substr(0, space);
    const auto [stop, error] =
        std::from_chars(word.data(), word.data() + word.size(), *number, base);
    rest.remove_prefix(space + 1);
    return error == std::errc() && stop == word.data() + word.size();
  };
  if (!read(&source->offset, 10) || !read(&source->bytes, 10) || !read(&source->file_bytes, 10) ||
      !read(&source->header_bytes, 10) || !read(&source->header_checksum, 16) || rest.empty() ||
      rest.front() != '/') {
    return wrong();
  }
  source->path = rest;
  if (source->header_bytes < kLeastHeader || source->offset < source->header_bytes ||
      source->offset > source->file_bytes || source->bytes < 1 ||
      source->bytes > source->file_bytes - source->offset) {
    return InvalidArgument("the weights must lie behind a header of ", kLeastHeader,
                           " bytes or more and within the file, got ", source->bytes,
                           " bytes from ", source->offset, ", a header of ", source->header_bytes,
                           " and ", source->file_bytes, " in all for ", source->path);
  }
  return {};
}

Status WeightsSource::Check() const {
  File file;
  std::string found;
  struct stat state = {};
  return OpenChecked(*this, &file, &found, &state);
}

Status HostWeights::Open(const cuda::Driver& driver, const cuda::OffloadDriver& offload,
                         const ContextIdentity& current, const WeightsSource& source,
                         std::shared_ptr<const HostWeights>* weights) {
  File file;
  std::string path;
  struct stat found = {};
  DYNAMO_MOE_RETURN_IF_ERROR(OpenChecked(source, &file, &path, &found));
  const Place place(found.st_dev, found.st_ino, found.st_mtim.tv_sec, found.st_mtim.tv_nsec,
                    source.offset, source.bytes, current.handle, current.id);
  const std::scoped_lock lock(opening);
  auto& known = OpenWeights();
  *weights = known[place].lock();
  if (*weights != nullptr) {
    return {};
  }
  for (auto each = known.begin(); each != known.end();) {
    each = each->second.expired() ? known.erase(each) : std::next(each);
  }
  // make_shared needs a public constructor.
  std::shared_ptr<HostWeights> opened(new HostWeights(driver, offload, current));
  if (const Status mapped = opened->Map(file.descriptor(), source); !mapped.ok()) {
    if (const Status copied = opened->Copy(file.descriptor(), path, source); !copied.ok()) {
      return {copied.code(), Text(copied.message(),
                                  "; nor can the file's own pages be pinned: ", mapped.message())};
    }
    opened->note_ =
        Text(path, ": ", source.bytes,
             " bytes are copied to pinned memory, since the file's own pages cannot be pinned: ",
             mapped.message());
  }
  known[place] = opened;
  *weights = std::move(opened);
  return {};
}

HostWeights::~HostWeights() {
  cuda::ScopedContext scope(driver_);
  // If the context is gone, nothing is pinned any more.
  if (EnterIfAlive(driver_, context_, &scope)) {
    const cuda::RelaxedCapture relaxed(driver_);
    if (registered_) {
      offload_.host_unregister(pages_);
    }
    if (copy_ != nullptr) {
      offload_.host_free(copy_);
    }
  }
  Unmap();
}

void HostWeights::Unmap() {
  if (pages_ != nullptr) {
    munmap(pages_, pages_bytes_);
    pages_ = nullptr;
  }
}

Status HostWeights::Map(int file, const WeightsSource& source) {
  if (source.offset % kAlignment != 0) {
    return InvalidArgument("the weights begin at byte ", source.offset, ", not at a multiple of ",
                           kAlignment);
  }
  int supported = 0;
  DYNAMO_MOE_RETURN_IF_ERROR(
      DeviceAttribute(driver_, cuda::kReadOnlyHostRegisterSupported, &supported));
  if (supported == 0) {
    return {DYNAMO_MOE_CUDA_ERROR,
            "the device does not support it (CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED "
            "is 0)"};
  }
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  const std::uint64_t within = source.offset % page;
  pages_bytes_ = (within + source.bytes + page - 1) / page * page;
  // Pinning the pages of a private mapping would copy them.
  void* const pages = mmap(nullptr, pages_bytes_, PROT_READ, MAP_SHARED, file,
                           static_cast<off_t>(source.offset - within));
  if (pages == MAP_FAILED) {
    return InvalidArgument("mmap: ", std::strerror(errno));
  }
  pages_ = pages;
  const cuda::RelaxedCapture relaxed(driver_);
  const char* function = "cuMemHostRegister";
  cuda::Result result =
      offload_.host_register(pages_, pages_bytes_, cuda::kHostMapped | cuda::kHostReadOnly);
  registered_ = result == cuda::kSuccess;
  if (registered_) {
    function = "cuMemHostGetDevicePointer";
    result = offload_.host_get_address(&address_, pages_, 0);
  }
  if (result == cuda::kSuccess) {
    address_ += within;
    return {};
  }
  if (registered_) {
    offload_.host_unregister(pages_);
    registered_ = false;
  }
  Unmap();
  return {DYNAMO_MOE_CUDA_ERROR,
          Text(cuda::Failure(driver_, result, function).message(),
               "; a limit on locked memory (ulimit -l, now ", LockedMemoryLimit(),
               ") may be raised, and the file may lie on a local file system such as ext4 or xfs")};
}

Status HostWeights::Copy(int file, const std::string& path, const WeightsSource& source) {
  const cuda::RelaxedCapture relaxed(driver_);
  cuda::Result result = offload_.host_allocate(&copy_, source.bytes, cuda::kHostMapped);
  if (result != cuda::kSuccess) {
    copy_ = nullptr;
    return cuda::Failure(driver_, result,
                         Text(path, ": ", source.bytes, " bytes of pinned memory: cuMemHostAlloc"));
  }
  result = offload_.host_get_address(&address_, copy_, 0);
  return result == cuda::kSuccess
             ? ReadAt(path, file, source.offset, source.bytes, copy_)
             : cuda::Failure(driver_, result, Text(path, ": cuMemHostGetDevicePointer"));
}

}  // namespace dynamo_moe
