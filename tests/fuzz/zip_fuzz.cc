// Fuzz target: any bytes as a file of torch.save. The file is refused with a clean message of one line, or every tensor
// lies inside the file and can be read.
#include <ATen/ATen.h>

#include <cstdlib>
#include <memory>
#include <span>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/formats/torch/torch_save.h"
#include "tessera/formats/torch/zip_archive.h"
#include "tests/fuzz/input_file.h"

namespace {

using namespace tessera;

void read_tensors(const TorchRecord& record, const PickleValue& value,
                  const std::shared_ptr<std::vector<std::byte>>& bytes) {
  if (const auto* info = record.find_tensor(value)) {
    if (info->storage_end > bytes->size() || info->begin() > info->storage_end) std::abort();
    const bool is_contiguous = at::IntArrayRef(info->strides) == c10::contiguous_strides(info->sizes);
    if (is_contiguous && info->begin() + info->nbytes() > info->storage_end) std::abort();
    const auto tensor = record_tensor(*bytes, *info, bytes);
    if (tensor.numel() > 0 && tensor.numel() < 1 << 16) tensor.clone();
    return;
  }
  if (value.kind() == PickleKind::kDict) {
    for (size_t i = 0; i < value.dict_size(); ++i) read_tensors(record, value.value(i), bytes);
  } else if (value.kind() == PickleKind::kList || value.kind() == PickleKind::kTuple) {
    for (const auto& item : value.items()) read_tensors(record, item, bytes);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto first = reinterpret_cast<const std::byte*>(data);
  const auto bytes = std::make_shared<std::vector<std::byte>>(first, first + size);
  try {
    const auto archive = ZipArchive::parse(*bytes, "fuzz");
    for (const auto& entry : archive.entries()) {
      if (entry.begin > entry.end || entry.end > size || archive.find(entry.name) != &entry) std::abort();
    }
    const auto record = TorchRecord::parse(*bytes, "fuzz");
    read_tensors(record, record.root(), bytes);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kFormat) std::abort();
    fuzz::check_message(error.what());
  }
  return 0;
}
