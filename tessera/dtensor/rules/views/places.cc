#include "tessera/dtensor/rules/views/places.h"

#include <ATen/ATen.h>

#include "tessera/base/error.h"

namespace tessera {

LocalFunction checked_where_empty(const OpCall& call, const Choice& choice, std::vector<Places> places) {
  const Sizes part = local_sizes(call.inputs[0].sizes, *call.mesh, choice.inputs[0]);
  const bool anything = c10::multiply_integers(call.inputs[0].sizes) > 0;
  if (!call.mesh->coordinate() || !anything || c10::multiply_integers(part) > 0) return nullptr;
  return [places = std::move(places)](const LocalCall& local) {
    for (const auto& place : places) {
      const c10::IValue& given = local.arg(static_cast<size_t>(place.arg));
      const at::Tensor index =
          place.element < 0 ? given.toTensor() : given.toListRef()[static_cast<size_t>(place.element)].toTensor();
      if (index.is_cpu() && index.numel() > 0) {
        const auto [least, most] = at::aminmax(index);
        const int64_t lowest = least.item<int64_t>();
        const int64_t highest = most.item<int64_t>();
        const int64_t from = place.from_end ? -place.size : 0;
        TESSERA_CHECK(lowest >= from && highest < place.size, ErrorKind::kShape,
                      "[dtensor.dispatch] {}: index out of range: found {}, wanted one of [{}, {}).", local.op.name,
                      lowest < from ? lowest : highest, from, place.size);
      }
    }
    local.call();
  };
}

}  // namespace tessera
