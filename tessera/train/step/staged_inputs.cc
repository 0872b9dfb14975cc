#include "tessera/train/step/staged_inputs.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "tessera/mesh/host_memory.h"

namespace tessera::train {

at::Tensor StagedInputs::copy_to_device(const at::Tensor& tensor) const {
  if (device_.is_cpu() || !tensor.defined()) return tensor;
  // The destination is allocated while the copy stream is the current stream. Memory from the compute stream's pool
  // could still be in use by kernels launched there, and the copy would have to wait for these kernels.
  const auto entered = copy_stream_.make_current();
  return to_device_async(device_, tensor);
}

std::vector<ModelInputs> StagedInputs::stage(const std::vector<data::Batch>& batches) const {
  std::vector<ModelInputs> out;
  for (const auto& batch : batches) {
    check_no_image_tokens(config_, batch.tokens);
    out.push_back({.tokens = copy_to_device(batch.tokens),
                   .positions = copy_to_device(batch.positions),
                   .document_ids = batch.document_ids,  // stay on the host, which plans attention from them
                   .labels = copy_to_device(batch.labels),
                   .image_tokens_checked = true});
  }
  if (!copy_stream_.exists()) return out;
  // The compute stream waits for the copies. record_stream keeps the allocator of the copy stream from reusing the
  // inputs before the compute stream has read them.
  copy_stream_.block_current_stream();
  const auto computes = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  for (const auto& each : out) {
    for (const at::Tensor& tensor : {each.tokens, each.positions, each.labels}) {
      if (tensor.defined()) tensor.record_stream(computes);
    }
  }
  return out;
}

}  // namespace tessera::train
