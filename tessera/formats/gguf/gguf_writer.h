// Writing GGUF files, version 3.
//
//   GgufWriter writer(path);
//   writer.set("general.architecture", std::string("llama"));
//   writer.announce("token_embd.weight", GgmlType::kQ8_0, {vocab, hidden});
//   writer.write("token_embd.weight", tensor);      // converts or quantises; any order, each once
//   writer.finish();                                // the file appears now
//
// All set() and announce() calls come before the first write(). Only one tensor needs to be in memory. A writer that is
// destroyed before finish() leaves no file. Errors: kIo when the disk refuses, kShape when a tensor does not have the
// announced shape.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/files/staged.h"
#include "tessera/formats/gguf/gguf.h"

namespace tessera {

class GgufWriter {
 public:
  explicit GgufWriter(const std::filesystem::path& path) : file_(path) {}

  void set(const std::string& key, GgufValue value);
  // type is F32, F16, BF16 or Q8_0 (rows of a multiple of 32); shape in libtorch's order.
  void announce(const std::string& name, GgmlType type, std::vector<int64_t> shape);
  void write(std::string_view name, const at::Tensor& tensor);
  void finish();

 private:
  struct AnnouncedTensor {
    GgufTensorInfo info;
    bool written = false;
  };
  void write_header();

  StagedFile file_;
  std::vector<std::pair<std::string, GgufValue>> metadata_;
  std::vector<std::string> order_;
  std::map<std::string, AnnouncedTensor, std::less<>> announced_;
  uint64_t data_bytes_ = 0;
  bool header_written_ = false;
};

}  // namespace tessera
