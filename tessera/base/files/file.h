// Reading and publishing whole files.
//
//   std::string text = read_file(path);
//   publish_file(path, text);          // a reader sees the old content or the new, never a part
//
// Thread-safe. With two writers of one path, the last rename wins.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace tessera {

// The whole content. Errors: kIo, with path and reason; kFormat for a file larger than limit_bytes.
std::string read_file(const std::filesystem::path& path, size_t limit_bytes = size_t{1} << 32);

// Writes a temporary file next to PATH (staged.h), fsyncs it, renames it to PATH, and fsyncs the folder. After a
// failure the temporary file is removed and PATH is unchanged; Error kIo says why.
void publish_file(const std::filesystem::path& path, std::string_view content);

// fsyncs a folder, so that a rename inside it survives a crash. Failures are ignored.
void sync_folder(const std::filesystem::path& folder);

}  // namespace tessera
