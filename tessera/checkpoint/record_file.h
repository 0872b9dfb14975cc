// A file of records, written one after another and hashed while it is written. Internal to checkpoint.
//
//   RecordFile file(staged / "__0_0.distcp");
//   const auto place = file.append([&](const ByteSink& sink) { write_tensor_record(tensor, sink); });
//   const ManifestFile written = file.publish();
//
// publish() makes the complete file appear under its name; without publish() no file appears (StagedFile). Used by one
// thread. Error kIo.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>

#include "tessera/base/files/staged.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/formats/torch/dcp_metadata.h"
#include "tessera/formats/torch/torch_save_writer.h"

struct XXH3_state_s;

namespace tessera {

class RecordFile {
 public:
  explicit RecordFile(const std::filesystem::path& path);

  // Appends one record: the bytes that `write` passes to the sink. Returns the record's position.
  DcpStorageInfo append(const std::function<void(const ByteSink&)>& write);
  // Syncs the file and makes it visible. Returns its name, size and hash.
  ManifestFile publish();

 private:
  struct FreeHash {
    void operator()(XXH3_state_s* hash) const;
  };
  StagedFile file_;
  std::unique_ptr<XXH3_state_s, FreeHash> hash_;
  uint64_t size_bytes_ = 0;
};

}  // namespace tessera
