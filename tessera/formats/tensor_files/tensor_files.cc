#include "tessera/formats/tensor_files/tensor_files.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include "tessera/base/enum_name.h"
#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/formats/detail/boxes.h"

namespace tessera {

uint64_t StoredTensor::size_bytes() const {
  uint64_t bytes = c10::elementSize(dtype);
  for (const int64_t size : shape) bytes *= static_cast<uint64_t>(size);
  return bytes;
}

const StoredTensor& TensorFiles::at(std::string_view name) const {
  const auto found = tensors_.find(name);
  TESSERA_CHECK(found != tensors_.end(), ErrorKind::kFormat,
                "[formats] {}: holds no tensor {}. List it with 'tessera ckpt ls PATH'.", path_.string(), quote(name));
  return found->second;
}

void TensorFiles::read(std::string_view name, c10::IntArrayRef offset, const at::Tensor& into) const {
  const auto& stored = at(name);
  TESSERA_CHECK(detail::is_box_inside(offset, into.sizes(), stored.shape), ErrorKind::kShape,
                "[formats] {}: {}: wanted [{}] from [{}] on, saved [{}]", path_.string(), quote(name),
                fmt::join(into.sizes(), ", "), fmt::join(offset, ", "), fmt::join(stored.shape, ", "));
  const at::NoGradGuard no_grad;
  read_box(std::string(name), offset, into);
}

at::Tensor TensorFiles::tensor(std::string_view name) const {
  const auto& stored = at(name);
  const auto whole = at::empty(stored.shape, at::TensorOptions(stored.dtype));
  read(name, std::vector<int64_t>(stored.shape.size(), 0), whole);
  return whole;
}

const char* to_string(TensorFiles::Format format) {
  return enum_name(format, {"safetensors", "sharded safetensors", "DCP", "torch.save"});
}

}  // namespace tessera
