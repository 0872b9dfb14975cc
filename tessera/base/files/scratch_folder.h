// A folder of this process alone under the system's temporary folder, removed with the object.
//
//   const ScratchFolder scratch("launch");
//   publish_file(scratch / "page.html", page);
//
// One object belongs to one thread.
#pragma once

#include <filesystem>
#include <string_view>

namespace tessera {

class ScratchFolder {
 public:
  // `where` begins the message of Error kIo, for a folder that cannot be made. Mode 0700.
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
