// A private folder below the system's temporary folder. The destructor removes it.
//
//   const ScratchFolder scratch("launch");
//   publish_file(scratch / "page.html", page);
//
// Not thread-safe.
#pragma once

#include <filesystem>
#include <string_view>

namespace tessera {

class ScratchFolder {
 public:
  // Creates the folder with mode 0700. Error kIo, whose message begins with `where`, when that fails.
  explicit ScratchFolder(std::string_view where);
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::filesystem::path& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

}  // namespace tessera
