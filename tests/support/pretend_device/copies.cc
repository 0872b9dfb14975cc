// Copies on the device and between the device and the host, and reading of numbers from the device.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <torch/library.h>

#include "tests/support/pretend_device/memory.h"
#include "tests/support/pretend_device/order.h"
#include "tests/support/pretend_device/registration.h"

namespace tessera::pretend {
namespace {

bool lies_pinned(const at::Tensor& tensor) { return is_pinned(tensor.storage().data()); }

void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const int device = from.device().index();
  const c10::Stream stream = current_stream(from.device().index());
  std::vector<Touch> touches;
  add_touch(touches, from, false);
  const Moment moment = launch(stream, "copy to host", touches);
  count(device, Count::kCopyToHost);
  const bool pinned = lies_pinned(to);
  if (!pinned) count(device, Count::kPageableCopy);
  const at::Tensor values = at::empty_like(to, at::MemoryFormat::Contiguous).copy_(host_view(from));
  if (non_blocking && pinned && to.is_contiguous()) {
    deliver_after(stream, moment, to, values);
  } else {
    host_wait(device, moment, "copy to host");
    to.copy_(values);
  }
}

void copy_to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const int device = to.device().index();
  const c10::Stream stream = current_stream(to.device().index());
  std::vector<Touch> touches;
  add_touch(touches, to, true);
  const Moment moment = launch(stream, "copy to device", touches);
  count(device, Count::kCopyToDevice);
  const bool pinned = lies_pinned(from);
  if (!pinned) count(device, Count::kPageableCopy);
  host_view(to).copy_(from);
  if (pinned && non_blocking) {
    if (from.is_contiguous()) watch_until(stream, moment, from);
  } else if (!non_blocking) {
    host_wait(device, moment, "copy to device");
  }
}

void copy_inside(const at::Tensor& from, const at::Tensor& to) {
  std::vector<Touch> touches;
  if (from.device() == to.device()) {
    add_touch(touches, from, false);
    add_touch(touches, to, true);
    run(current_stream(to.device().index()), "copy", touches,
        [from = host_view(from), to = host_view(to)] { at::Tensor(to).copy_(from); });
  } else {
    add_touch(touches, from, false);
    const c10::Stream source = current_stream(from.device().index()), target = current_stream(to.device().index());
    host_wait(from.device().index(), launch(source, "copy to another device", touches), "copy between devices");
    touches.clear();
    add_touch(touches, to, true);
    launch(target, "copy from another device", touches);
    host_view(to).copy_(host_view(from));
  }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (to.numel() == 0) return to;
  if (to.is_cpu()) {
    copy_to_host(self, to, non_blocking);
  } else if (self.is_cpu()) {
    copy_to_device(self, to, non_blocking);
  } else {
    copy_inside(self, to);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar read_number(const at::Tensor& self) {
  std::vector<Touch> touches;
  add_touch(touches, self, false);
  const c10::Stream stream = current_stream(self.device().index());
  host_wait(self.device().index(), launch(stream, "item", touches), "item");
  count(self.device().index(), Count::kCopyToHost);
  const at::AutoDispatchBelowADInplaceOrView below;
  return at::_local_scalar_dense(host_view(self));
}

}  // namespace

void register_copies() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  library.impl("_local_scalar_dense", TORCH_FN(read_number));
  // Without this, the fallbacks of Conjugate and Negative resolve an operand by a copy, which would call them again.
  static torch::Library conjugate(torch::Library::IMPL, "aten", c10::DispatchKey::Conjugate, __FILE__, __LINE__);
  conjugate.impl("_copy_from", torch::CppFunction::makeFallthrough());
  static torch::Library negative(torch::Library::IMPL, "aten", c10::DispatchKey::Negative, __FILE__, __LINE__);
  negative.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace tessera::pretend
