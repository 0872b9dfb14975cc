// Symbolic links in folders that come from strangers. A link may lead to any file of this machine, and a program that
// copies what it finds would publish that file.
//
//   const auto place = follow_links(dir, "merges.txt");
//   if (!place.is_inside) ...                              // place.real is where it leads
#pragma once

#include <filesystem>
#include <string_view>

namespace tessera {

// Whether a path that a file gives stays inside of its folder, before links: parts between single slashes, none of them
// "." or "..", without a backslash or a NUL.
bool is_inner_path(std::string_view path);

struct LinkedPlace {
  std::filesystem::path real;  // without any link in it; empty for a link that leads nowhere
  bool is_inside = false;
};

// Where DIR/NAME lies once every link is followed. It is inside when that is below DIR itself, or below the blobs that
// the Hub's cache keeps beside a snapshot (snapshots/ID/NAME -> ../../blobs/HASH).
LinkedPlace follow_links(const std::filesystem::path& dir, const std::filesystem::path& name);

}  // namespace tessera
