// Moves CPU storages of tensors to a mapped file and back. While the storages are in the file, they take memory only
// for pages in use, and the tensors can still be read and written in place.
//
//   storages_to_file(storages, "/scratch");       // all tensors over these storages stay valid
//   storages_to_memory(storages);
//
// A storage object stays the same and only its data pointer changes. Views, buffers that several tensors share and
// tensors saved by autograd therefore move along. The file has no name: it takes space in the file system of the folder
// until the last storage has left it, or the process ends. Not to be called while other threads use the tensors. No
// communication.
#pragma once

#include <c10/core/Storage.h>

#include <filesystem>
#include <vector>

namespace tessera::train {

// Moves the data of `storages` to a new mapped file in `folder`. `storages` must be CPU storages, each listed at most
// once. Error kIo leaves all storages unchanged.
void storages_to_file(const std::vector<c10::Storage>& storages, const std::filesystem::path& folder);
// Moves the storages that are in a file of storages_to_file() to memory; other storages are not changed. If an
// allocation fails, the storages that come earlier in `storages` have been moved, and the others are still in the file.
void storages_to_memory(const std::vector<c10::Storage>& storages);

}  // namespace tessera::train
