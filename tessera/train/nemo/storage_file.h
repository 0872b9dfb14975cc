// Memory of the CPU that lies in a file for a while: what is not in use needs no memory then, and can still be read and
// written in place.
//
//   storages_to_file(storages, "/scratch");       // all tensors over them stay valid
//   storages_to_memory(storages);
//
// Storages keep their identity, so that views, buffers that many tensors share and what autograd has saved move along.
// The file has no name: it takes space in the folder's file system until the last storage has left it, or the process
// ends. Not to be called while other threads use the tensors. No communication.
#pragma once

#include <c10/core/Storage.h>

#include <filesystem>
#include <vector>

namespace tessera::train {

// Each storage once, on the CPU. Error kIo, then nothing has changed.
void storages_to_file(const std::vector<c10::Storage>& storages, const std::filesystem::path& folder);
// Those that lie in a file of storages_to_file; others stay as they are. Fails like any allocation, what has been moved
// until then being in memory.
void storages_to_memory(const std::vector<c10::Storage>& storages);

}  // namespace tessera::train
