#include "tessera/formats/folder_links.h"

#include <algorithm>

namespace tessera {
namespace {

bool is_below(const std::filesystem::path& file, const std::filesystem::path& folder) {
  const auto relative = file.lexically_relative(folder);
  return !relative.empty() && *relative.begin() != "..";
}

}  // namespace

bool is_path_inside_folder(std::string_view path) {
  if (path.find('\0') != path.npos || path.find('\\') != path.npos) return false;
  for (size_t at = 0; at <= path.size();) {
    const size_t slash = std::min(path.find('/', at), path.size());
    const auto part = path.substr(at, slash - at);
    if (part.empty() || part == "." || part == "..") return false;
    at = slash + 1;
  }
  return true;
}

// canonical() resolves every link of both paths, so a lexical comparison of the results decides where the file is. A
// snapshot of the Hub's cache is a folder of links into ../../blobs; the folder blobs is trusted like the snapshot
// itself.
ResolvedLink resolve_links(const std::filesystem::path& dir, const std::filesystem::path& name) {
  std::error_code error;
  const auto folder = std::filesystem::canonical(dir, error);
  if (error) return {};
  const auto file = std::filesystem::canonical(dir / name, error);
  if (error) return {};
  const auto cache = folder.parent_path();
  const bool is_blob = cache.filename() == "snapshots" && is_below(file, cache.parent_path() / "blobs");
  return {file, is_blob || is_below(file, folder)};
}

}  // namespace tessera
