#include "tessera/checkpoint/record_file.h"

#include <xxhash.h>

namespace tessera {

void RecordFile::FreeHash::operator()(XXH3_state_s* hash) const { XXH3_freeState(hash); }

RecordFile::RecordFile(const std::filesystem::path& path) : file_(path), hash_(XXH3_createState()) {
  XXH3_64bits_reset(hash_.get());
}

DcpStorageInfo RecordFile::append(const std::function<void(const ByteSink&)>& write) {
  const uint64_t begin = size_bytes_;
  write([this](std::span<const std::byte> bytes) {
    XXH3_64bits_update(hash_.get(), bytes.data(), bytes.size());
    file_.write_at(size_bytes_, bytes);
    size_bytes_ += bytes.size();
  });
  return {.relative_path = file_.path().filename().string(), .offset = begin, .length = size_bytes_ - begin};
}

ManifestFile RecordFile::publish() {
  file_.publish();
  return {file_.path().filename().string(), size_bytes_, XXH3_64bits_digest(hash_.get())};
}

}  // namespace tessera
