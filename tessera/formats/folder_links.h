// Checks of symbolic links in folders from untrusted sources. A link may lead to any file of this machine, and a
// program that copies or uploads the folder would then reveal the contents of that file.
//
//   const auto place = resolve_links(dir, "merges.txt");
//   if (!place.is_inside) ...                              // place.real is the file that the link leads to
#pragma once

#include <filesystem>
#include <string_view>

namespace tessera {

// Whether a relative path from a file stays inside its folder (links are not followed here): parts between single
// slashes, no part "." or "..", no backslash, no NUL.
bool is_path_inside_folder(std::string_view path);

struct ResolvedLink {
  std::filesystem::path real;  // path without links; empty for a link to a missing file
  bool is_inside = false;
};

// Resolves all links of DIR/NAME. The file is inside when it is below DIR, or below the blobs folder next to a snapshot
// of the Hub's cache (snapshots/ID/NAME -> ../../blobs/HASH).
ResolvedLink resolve_links(const std::filesystem::path& dir, const std::filesystem::path& name);

}  // namespace tessera
