#include "kernels/bundle_file.h"

#include <dlfcn.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <system_error>
#include <tuple>
#include <utility>

#include "bundle/format.h"
#include "node/attributes.h"
#include "node/node.h"

namespace dynamo_moe {
namespace {

constexpr const char* kPathVariable = "DYNAMO_MOE_KERNELS";
constexpr const char* kArchitecturesVariable = "DYNAMO_MOE_ARCHITECTURES";
constexpr const char* kFileName = "dynamo_moe.moek";

// Stays the same as long as a file is not changed.
using FileIdentity = std::tuple<dev_t, ino_t, off_t, time_t, long>;

thread_local std::shared_ptr<BundleFile> given;

std::mutex opening;
// Never destroyed: layers may outlive static objects.
std::map<FileIdentity, std::weak_ptr<BundleFile>>& OpenBundles() {
  static auto* const bundles = new std::map<FileIdentity, std::weak_ptr<BundleFile>>();
  return *bundles;
}

std::string BesideThisLibrary() {
  Dl_info info = {};
  if (dladdr(reinterpret_cast<const void*>(&BesideThisLibrary), &info) == 0 ||
      info.dli_fname == nullptr) {
    return kFileName;
  }
  const std::string library = info.dli_fname;
  const std::size_t slash = library.rfind('/');
  return (slash == std::string::npos ? "" : library.substr(0, slash + 1)) + kFileName;
}

std::string ChoosePath(const std::string& path) {
  if (!path.empty()) {
    return path;
  }
  const char* const variable = std::getenv(kPathVariable);
  return variable != nullptr && *variable != '\0' ? variable : BesideThisLibrary();
}

Status CannotRead(const std::string& path) {
  return InvalidArgument("cannot read the kernels' bundle ", path, ": ", std::strerror(errno),
                         "; name it by the attribute ", kKernels,
                         " or by the environment variable ", kPathVariable);
}

Status OfFile(const std::string& path, const Status& status) {
  return status.ok() ? status : Status(status.code(), Text(path, ": ", status.message()));
}

}  // namespace

Status ReadArchitectures(Architectures* names) {
  const char* const variable = std::getenv(kArchitecturesVariable);
  std::string_view rest = variable == nullptr ? "" : variable;
  while (!rest.empty()) {
    const std::size_t comma = std::min(rest.find(','), rest.size());
    std::string_view name = rest.substr(0, comma);
    rest.remove_prefix(std::min(comma + 1, rest.size()));
    if (name.substr(0, 3) == "sm_") {
      name.remove_prefix(3);
    }
    std::uint32_t number = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
    if (error != std::errc() || end != name.data() + name.size()) {
      return InvalidArgument("the environment variable ", kArchitecturesVariable,
                             " must name architectures, as in sm_89,sm_120; got '",
                             Printable(variable), "'");
    }
    names->push_back(number);
  }
  return {};
}

Status BundleFile::Open(const std::string& path, std::shared_ptr<BundleFile>* bundle) {
  const std::string chosen = ChoosePath(path);
  struct stat file = {};
  if (stat(chosen.c_str(), &file) != 0) {
    return CannotRead(chosen);
  }
  const FileIdentity identity(file.st_dev, file.st_ino, file.st_size, file.st_mtim.tv_sec,
                              file.st_mtim.tv_nsec);
  const std::scoped_lock lock(opening);
  std::weak_ptr<BundleFile>& known = OpenBundles()[identity];
  *bundle = known.lock();
  if (*bundle == nullptr) {
    auto read = std::make_shared<BundleFile>();
    read->path_ = chosen;
    DYNAMO_MOE_RETURN_IF_ERROR(read->Read(static_cast<std::size_t>(file.st_size)));
    known = read;
    *bundle = std::move(read);
  }
  return {};
}

Status BundleFile::Read(std::size_t size) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path_.c_str(), "rb"),
                                                             &std::fclose);
  if (file == nullptr) {
    return CannotRead(path_);
  }
  bytes_.resize(size);
  // If the file has become shorter, the bundle counts as damaged.
  bytes_.resize(std::fread(bytes_.data(), 1, size, file.get()));
  if (std::ferror(file.get()) != 0) {
    return CannotRead(path_);
  }
  return Parse();
}

Status BundleFile::Parse() {
  return OfFile(path_, Bundle::Open(bytes_.data(), bytes_.size(), &content_));
}

Status BundleFile::FromBytes(std::string name, std::string_view bytes,
                             std::shared_ptr<BundleFile>* bundle) {
  auto read = std::make_shared<BundleFile>();
  read->path_ = std::move(name);
  read->bytes_ = bytes;
  DYNAMO_MOE_RETURN_IF_ERROR(read->Parse());
  *bundle = std::move(read);
  return {};
}

void BundleFile::Give(std::shared_ptr<BundleFile> bundle) { given = std::move(bundle); }

std::shared_ptr<BundleFile> BundleFile::Given() { return given; }

std::uint32_t BundleFile::checksum() const {
  std::uint32_t checksum;
  std::memcpy(&checksum, bytes_.data() + format::kChecksumOffset, sizeof(checksum));
  return checksum;
}

Status BundleFile::Select(const Architectures& names,
                          const std::function<bool(const dynamo_moe_layer&)>& wanted,
                          std::vector<std::string_view>* programs) const {
  std::set<std::uint32_t> known;
  for (const Bundle::Entry& each : this->programs()) {
    const bool named =
        names.empty() || std::find(names.begin(), names.end(), each.architecture) != names.end();
    if (wanted(each.layer) && known.insert(each.architecture).second && named) {
      programs->push_back(each.bytes);
    }
  }
  for (const std::uint32_t name : names) {
    if (!known.empty() && known.count(name) == 0) {
      std::string others;
      for (const std::uint32_t each : known) {
        others += Text(others.empty() ? "" : ", ", "sm_", each);
      }
      return {DYNAMO_MOE_NOT_FOUND,
              Text("the environment variable ", kArchitecturesVariable, " names sm_", name, ", ",
                   path_, " has this layer for ", others)};
    }
  }
  return {};
}

}  // namespace dynamo_moe
