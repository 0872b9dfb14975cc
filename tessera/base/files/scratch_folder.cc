#include "tessera/base/files/scratch_folder.h"

#include <stdlib.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "tessera/base/error.h"

namespace tessera {

ScratchFolder::ScratchFolder(std::string_view where) {
  std::error_code failed;
  std::filesystem::path parent = std::filesystem::temp_directory_path(failed);
  if (failed) parent = "/tmp";
  std::string pattern = (parent / "tessera-XXXXXX").string();
  TESSERA_CHECK(::mkdtemp(pattern.data()), ErrorKind::kIo, "[{}] {}: {}", where, pattern, std::strerror(errno));
  path_ = pattern;
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace tessera
