// The implementation of all operations without their own kernel: the CPU's kernel, on CPU tensors over the device's
// bytes.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "tests/support/pretend_device/memory.h"
#include "tests/support/pretend_device/order.h"
#include "tests/support/pretend_device/registration.h"

namespace tessera::pretend {
namespace {

using c10::IValue;

// The sizes of the results depend on values, so the host must wait for these operations.
bool has_shape_by_values(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::nonzero",    "aten::masked_select", "aten::_unique2",           "aten::_unique",
      "aten::unique_dim", "aten::bincount",      "aten::unique_consecutive", "aten::repeat_interleave"};
  return names.contains(name);
}

// CUDA accepts indices on the host, and copies them.
bool takes_host_indices(const std::string& name) {
  return name == "aten::index" || name == "aten::_index_put_impl_" || name == "aten::index_put_";
}

// One call: the tensors of the device, the CPU tensor for each, and the memory that the call reads and writes.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : schema_(op.schema()), name_(schema_.name()), stack_(stack), begin_(stack.size() - schema_.arguments().size()) {}

  void run(const c10::OperatorHandle& op) {
    for (size_t i = 0; i < schema_.arguments().size(); ++i) take_argument(schema_.arguments()[i], stack_[begin_ + i]);
    if (device_ < 0) device_ = current_device();
    const c10::DeviceGuard guard(c10::Device(c10::kPrivateUse1, device_));
    for (size_t i = 0; i < schema_.arguments().size(); ++i) lay_generator(schema_.arguments()[i], stack_[begin_ + i]);
    const c10::Stream stream = current_stream(device_);
    prepare(stream, name_.c_str(), touches_);
    const auto arguments = captures(stream) ? kept_arguments() : torch::jit::Stack();
    if (copies_indices_) {
      count(device_, Count::kCopyToDevice);
      count(device_, Count::kPageableCopy);
    }
    if (waits_for_values() || copies_indices_) host_wait(stream, name_.c_str());
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    }
    for (const Pair& pair : pairs_) adopt(pair);
    const size_t results = stack_.size() - schema_.returns().size();
    for (size_t i = results; i < stack_.size(); ++i) stack_[i] = on_device(stack_[i]);
    if (!arguments.empty()) keep_kernel(op, arguments, stream);
  }

 private:
  struct Pair {
    at::Tensor device, host;
    const void* data;
    std::vector<int64_t> sizes, strides;
  };

  // Arguments for a graph: tensors of the host are copied with their current values.
  torch::jit::Stack kept_arguments() const {
    torch::jit::Stack out(stack_.begin() + static_cast<std::ptrdiff_t>(begin_), stack_.end());
    for (IValue& value : out) {
      if (!value.isTensor() || !value.toTensor().defined()) continue;
      const at::Tensor& tensor = value.toTensor();
      const bool is_ours = std::ranges::any_of(pairs_, [&](const Pair& pair) { return pair.host.is_same(tensor); });
      if (!is_ours) value = tensor.clone();
    }
    return out;
  }

  // Adds the call to a graph. A replay runs on the same bytes; new results are copied to the memory of the first run's
  // results.
  void keep_kernel(const c10::OperatorHandle& op, const torch::jit::Stack& arguments, c10::Stream stream) {
    std::vector<at::Tensor> made;
    for (const auto& each : made_) made.push_back(pretend::host_view(each));
    for (const auto& each : made_) add_touch(touches_, each, true);
    keep(stream, name_.c_str(), touches_,
         [op, arguments, made = std::move(made), skipped = made_at_, returns = schema_.returns().size()] {
           torch::jit::Stack stack = arguments;
           const at::AutoDispatchBelowADInplaceOrView below;
           op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
           std::vector<at::Tensor> results;
           for (size_t i = stack.size() - returns; i < stack.size(); ++i) {
             if (stack[i].isTensor()) results.push_back(stack[i].toTensor());
             if (stack[i].isTensorList()) {
               for (const at::Tensor& each : stack[i].toTensorVector()) results.push_back(each);
             }
           }
           for (size_t i = 0; i < made.size(); ++i) {
             if (made[i].numel() > 0) at::Tensor(made[i]).copy_(results.at(skipped[i]));
           }
         });
  }

  bool waits_for_values() const {
    if (has_shape_by_values(name_)) return true;
    for (const auto& each : schema_.returns()) {
      if (!each.type()->isSubtypeOf(*c10::TensorType::get()) && each.type()->kind() != c10::TypeKind::ListType &&
          each.type()->kind() != c10::TypeKind::TupleType) {
        return true;
      }
    }
    return false;
  }

  void take_argument(const c10::Argument& argument, IValue& value) {
    const bool writes = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    if (value.isTensor()) {
      value = on_host(value.toTensor(), writes, argument);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorVector()) {
        list.push_back(on_host(each, writes, argument, /*in_list=*/true));
      }
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorList()) {
        list.push_back(each ? std::optional(on_host(*each, writes, argument, /*in_list=*/true)) : std::nullopt);
      }
      value = list;
    } else if (value.isDevice()) {
      take_device(value.toDevice().has_index() ? value.toDevice().index() : current_device());
      value = c10::Device(c10::kCPU);
    }
  }

  void take_device(c10::DeviceIndex index) {
    TORCH_CHECK(device_ < 0 || device_ == index, "[pretend] ", name_, ": tensors of devices ",
                static_cast<int>(device_), " and ", static_cast<int>(index), ". Move them to one.");
    device_ = index;
  }

  at::Tensor on_host(const at::Tensor& tensor, bool writes, const c10::Argument& argument, bool in_list = false) {
    if (!tensor.defined()) return tensor;
    if (tensor.is_cpu()) {
      const bool indices = takes_host_indices(name_) && argument.name() == "indices";
      TORCH_CHECK(indices || (tensor.dim() == 0 && !writes && !in_list), "[pretend] ", name_, ": ", argument.name(),
                  " lies on the CPU beside tensors of the device. Move it there.");
      if (indices) copies_indices_ = true;
      return tensor;
    }
    TORCH_CHECK(tensor.device().type() == c10::kPrivateUse1, "[pretend] ", name_, ": a tensor on ", tensor.device());
    take_device(tensor.device().index());
    add_touch(touches_, tensor, writes);
    for (const Pair& pair : pairs_) {  // kernels check whether input and output are the same tensor
      if (pair.device.is_same(tensor)) return pair.host;
    }
    at::Tensor host = host_view(tensor, storages_);
    pairs_.push_back({tensor, host, host.storage().data(), host.sizes().vec(), host.strides().vec()});
    return host;
  }

  void lay_generator(const c10::Argument& argument, IValue& value) const {
    const auto& type = *argument.type();
    const bool wanted = type.kind() == c10::TypeKind::GeneratorType ||
                        (type.kind() == c10::TypeKind::OptionalType &&
                         type.castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::GeneratorType);
    if (!wanted) return;
    refuse_capture(current_stream(device_), name_.c_str());
    if (value.isNone()) {
      value = host_generator(default_generator(device_));
    } else {
      TORCH_CHECK(value.toGenerator().device().type() == c10::kPrivateUse1, "[pretend] ", name_, ": a generator of ",
                  value.toGenerator().device(), " for tensors of the device");
      value = host_generator(value.toGenerator());
    }
  }

  // Applies to the device's tensor the new size or storage that the kernel has given to the CPU tensor.
  static void adopt(const Pair& pair) {
    const at::Tensor& host = pair.host;
    if (host.storage().data() != pair.data) {
      refuse_capture(current_stream(pair.device.device().index()), "resize");
      const size_t bytes = host.storage().nbytes();
      resize_bytes(pair.device.storage().unsafeGetStorageImpl(), bytes);
      if (bytes > 0) std::memcpy(shadow(pair.device.storage().data()), host.storage().data(), bytes);
    }
    if (host.sizes() != pair.sizes || host.strides() != pair.strides) {
      pair.device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

  IValue on_device(const IValue& value) {
    if (value.isTensor()) return on_device(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(on_device(each));
    return list;
  }

  at::Tensor on_device(const at::Tensor& host) {
    const size_t place = results_++;
    if (!host.defined()) return host;
    for (const Pair& pair : pairs_) {
      if (pair.host.is_same(host)) return pair.device;
    }
    for (const Pair& pair : pairs_) {
      if (pair.host.storage().unsafeGetStorageImpl() != host.storage().unsafeGetStorageImpl()) continue;
      at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(pair.device.storage()), pair.device.key_set(), host.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
      return view;
    }
    at::Tensor made =
        at::empty_strided(host.sizes(), host.strides(), host.options().device(c10::Device(c10::kPrivateUse1, device_)));
    if (made.numel() > 0) host_view(made).copy_(host.detach());
    if (host.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    made_.push_back(made);
    made_at_.push_back(place);
    return made;
  }

  using Storages = std::map<const c10::StorageImpl*, c10::Storage>;
  static at::Tensor host_view(const at::Tensor& tensor, Storages& storages) {
    const at::Tensor fresh = pretend::host_view(tensor);
    const auto [found, isNew] = storages.emplace(tensor.storage().unsafeGetStorageImpl(), fresh.storage());
    if (!isNew) fresh.unsafeGetTensorImpl()->set_storage_keep_dtype(found->second);
    return fresh;
  }
  at::Tensor host_view(const at::Tensor& tensor) const { return pretend::host_view(tensor); }

  const c10::FunctionSchema& schema_;
  const std::string& name_;
  torch::jit::Stack& stack_;
  const size_t begin_;
  c10::DeviceIndex device_ = -1;
  bool copies_indices_ = false;
  std::vector<Touch> touches_;
  std::vector<Pair> pairs_;
  Storages storages_;
  size_t results_ = 0;            // number of result tensors so far
  std::vector<at::Tensor> made_;  // results that share no memory with an argument
  std::vector<size_t> made_at_;   // and their positions among the results
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, *stack).run(op); }

}  // namespace

at::Tensor host_view(const at::Tensor& tensor) {
  const at::Storage& own = tensor.storage();
  c10::Storage storage(c10::Storage::use_byte_size_t{}, own.nbytes(),
                       c10::DataPtr(shadow(own.data()), c10::Device(c10::kCPU)), c10::GetAllocator(c10::kCPU),
                       /*resizable=*/true);
  at::Tensor host = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* const impl = host.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  impl->_set_conj(tensor.is_conj());
  impl->_set_neg(tensor.is_neg());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return host;
}

void register_fallback() {
  static torch::Library library(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  // One kernel as on CUDA. libtorch would otherwise use several kernels, or refuse a device type that it does not know.
  static torch::Library whole(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const char* name : {"conj_physical_", "convolution", "convolution_backward", "native_layer_norm",
                           "native_group_norm", "mode.values", "split_with_sizes_copy.out", "_chunk_cat.out",
                           "_foreach_norm.Scalar", "_foreach_mul_.Scalar", "_foreach_mul_.Tensor",
                           "_foreach_add_.Scalar", "_foreach_add_.List", "_foreach_add_.Tensor", "_foreach_copy_"}) {
    whole.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

}  // namespace tessera::pretend
