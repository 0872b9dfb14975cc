// Reading and publishing whole files.
//
//   std::string text = read_file(path);
//   publish_file(path, text);          // a reader sees the old content or the new, never a part
//
// Thread-safe; two writers of one path: the last rename wins.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace tessera {

// The whole content. Error kIo names path and reason; larger than limit_bytes is kFormat.
std::string read_file(const std::filesystem::path& path, size_t limit_bytes = size_t{1} << 32);

// Writes to a new name beside it (staged.h), fsyncs, renames over PATH, fsyncs the folder. On any failure the
// temporary file is removed, PATH is as before and Error kIo says why.
void publish_file(const std::filesystem::path& path, std::string_view content);

// fsync of a folder, so that a rename inside it survives a crash.
void sync_folder(const std::filesystem::path& folder);

}  // namespace tessera
