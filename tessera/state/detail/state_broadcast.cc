#include "tessera/state/detail/state_broadcast.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/agreement.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/state/broadcast_state.h"
#include "tessera/state/state_dict_structure.h"
#include "tessera/state/state_message.h"

namespace tessera::detail {

StateBroadcast::StateBroadcast(const StateDict& full, comm::Group& group) : group_(group) {
  std::string bytes;
  comm::attempt_together(group, [&] {
    if (group.rank() != 0) return;
    bytes = encode_state(full, TensorsInMessage::kShapes);
    visit_tensors(full, [](const at::Tensor& tensor) {
      TESSERA_CHECK(!tensor.is_meta(), ErrorKind::kShape,
                    "[state.broadcast] found a tensor on the meta device, which has no values");
    });
  });
  bytes = comm::broadcast_bytes(group, bytes);
  message_ = std::move(decode_state(bytes).dict());
  visit_tensors(message_, [&](const at::Tensor& tensor) {
    if (tensor.is_meta()) announced_.push_back(tensor);
  });
  if (group.rank() != 0) return;
  visit_tensors(full, [&](const at::Tensor& tensor) {
    if (tensor.dim() > 0) values_.push_back(tensor);
  });
}

void StateBroadcast::each(c10::Device device, const std::function<void(const at::Tensor&, const at::Tensor&)>& take) {
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < announced_.size(); ++i) {
    const at::Tensor& own = group_.rank() == 0 ? values_[i] : announced_[i];
    take(announced_[i], broadcast_tensor(group_, own, device, "broadcast_state_dict"));
  }
}

}  // namespace tessera::detail
