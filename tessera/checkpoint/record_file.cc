#include "tessera/checkpoint/record_file.h"

#include <xxhash.h>

namespace tessera {

struct RecordFile::Hash {
  Hash() : state(XXH3_createState()) { XXH3_64bits_reset(state); }
  ~Hash() { XXH3_freeState(state); }
  Hash(const Hash&) = delete;
  Hash& operator=(const Hash&) = delete;
  XXH3_state_t* state;
};

RecordFile::RecordFile(const std::filesystem::path& path) : file_(path), hash_(std::make_unique<Hash>()) {}
RecordFile::~RecordFile() = default;

RecordPlace RecordFile::append(const std::function<void(const ByteSink&)>& write) {
  const uint64_t begin = size_bytes_;
  write([this](std::span<const std::byte> bytes) {
    XXH3_64bits_update(hash_->state, bytes.data(), bytes.size());
    file_.write_at(size_bytes_, bytes);
    size_bytes_ += bytes.size();
  });
  return {begin, size_bytes_ - begin};
}

ManifestFile RecordFile::publish() {
  file_.publish();
  return {file_.path().filename().string(), size_bytes_, XXH3_64bits_digest(hash_->state)};
}

}  // namespace tessera
