#include "tessera/state/state_message.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <limits>

#include "tessera/base/error.h"
#include "tessera/base/files/copy_bytes.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/formats/torch/pickler.h"
#include "tessera/formats/torch/unpickler.h"
#include "tessera/state/pickled_state.h"

namespace tessera {
namespace {

constexpr const char* kMessage = "a message between ranks";

// Returns the persistent id of a tensor: (dtype number, sizes, bytes). With TensorsInMessage::kShapes the id of a
// tensor with dims has None instead of the bytes.
PickleValue pickle_tensor(const at::Tensor& tensor, TensorsInMessage tensors) {
  TESSERA_CHECK(tensor.defined() && !is_dtensor(tensor) && tensor.layout() == c10::kStrided && !tensor.is_quantized(),
                ErrorKind::kShape, "[state.encode] found {}, wanted a plain dense tensor. Gather it first.",
                !tensor.defined()    ? "an undefined tensor"
                : is_dtensor(tensor) ? "a DTensor"
                                     : "a sparse or quantised one");
  const bool by_value = tensors == TensorsInMessage::kValues || tensor.dim() == 0;
  TESSERA_CHECK(!by_value || !tensor.is_meta(), ErrorKind::kShape,
                "[state.encode] found a tensor on the meta device, which has no values");
  PickleValue::Items sizes;
  for (const auto size : tensor.sizes()) sizes.emplace_back(size);
  PickleValue bytes;
  if (by_value) {
    const auto values = tensor.detach().resolve_conj().resolve_neg().to(c10::kCPU).contiguous();
    bytes = PickleValue::bytes({static_cast<const char*>(values.const_data_ptr()), values.nbytes()});
  }
  return PickleValue::tuple(
      {static_cast<int64_t>(tensor.scalar_type()), PickleValue::tuple(std::move(sizes)), std::move(bytes)});
}

void check_id(bool holds, const char* fault) {
  TESSERA_CHECK(holds, ErrorKind::kFormat, "[state.decode] {}: found a tensor with {}", kMessage, fault);
}

// Checks every field before memory is allocated: a damaged message must give an error, not a wrong tensor. Sizes of 0
// count as 1 in the product, so that the other sizes of an empty tensor are checked for overflow too.
at::Tensor unpickle_tensor(const PickleValue& id) {
  const auto parts = id.items();
  check_id(parts.size() == 3, "another number of parts than 3");
  const auto number = parts[0].as_int();
  check_id(0 <= number && number < static_cast<int64_t>(c10::ScalarType::NumOptions), "an unknown dtype");
  const auto dtype = static_cast<c10::ScalarType>(number);
  check_id(dtype != c10::ScalarType::Undefined && !c10::isQIntType(dtype), "an unknown dtype");
  std::vector<int64_t> sizes;
  auto nbytes = static_cast<int64_t>(c10::elementSize(dtype));
  bool is_empty = false;
  for (const auto& size : parts[1].items()) {
    sizes.push_back(size.as_int());
    check_id(sizes.back() >= 0, "a negative size");
    is_empty |= sizes.back() == 0;
    const auto count = std::max<int64_t>(sizes.back(), 1);
    check_id(nbytes <= std::numeric_limits<int64_t>::max() / count, "more elements than memory can hold");
    nbytes *= count;
  }
  const auto options = at::TensorOptions().dtype(dtype);
  if (parts[2].is_none()) return at::empty(sizes, options.device(c10::kMeta));
  const auto& bytes = parts[2].as_bytes();
  check_id(static_cast<int64_t>(bytes.size()) == (is_empty ? 0 : nbytes), "another number of bytes than its shape has");
  at::Tensor tensor = at::empty(sizes, options);
  copy_bytes(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

}  // namespace

std::string encode_state(const StateValue& value, TensorsInMessage tensors) {
  const auto tensor = [tensors](const at::Tensor& each) { return pickle_tensor(each, tensors); };
  return pickle(to_pickle(value, tensor), {.protocol = 4});
}

StateValue decode_state(std::string_view bytes) {
  return from_pickle(unpickle(std::as_bytes(std::span(bytes)), kMessage), kMessage, unpickle_tensor);
}

}  // namespace tessera
