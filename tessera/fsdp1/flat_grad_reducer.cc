#include "tessera/fsdp1/flat_grad_reducer.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/parallel/data_parallel/data_parallel_state.h"

namespace tessera {
namespace {

// Returns the elements of `gradient` as a 1-d tensor, in the order in which the flat parameter stores the elements of
// `member`.
at::Tensor in_storage_order(const FlatMember& member, const at::Tensor& gradient) {
  if (member.contiguous) return gradient.contiguous().view({-1});
  at::Tensor strided = gradient;
  if (gradient.strides() != at::IntArrayRef(member.strides)) {
    strided = at::empty_strided(member.shape, member.strides, gradient.options());
    strided.copy_(gradient);
  }
  return strided.as_strided({member.numel}, {1}, strided.storage_offset());
}

}  // namespace

FlatGradReducer::FlatGradReducer(const FlatParameterLayout& layout, std::shared_ptr<comm::Group> group,
                                 c10::Device device, Options options)
    : layout_(layout), group_(std::move(group)), reduces_(group_), device_(device), options_(std::move(options)) {
  if (options_.dtype == c10::ScalarType::Undefined) options_.dtype = layout.dtype();
  // A reduce-scatter sends one contiguous part of the buffer to each rank, and all parts have the same size. A part
  // holds the gradient of the rank's shard and after it one flag per member. A member that extends over several shards
  // therefore has one BufferRange in each of their parts.
  parts_count_ = options_.sharded ? layout.world_size() : 1;
  values_numel_ = options_.sharded ? layout.sharded_numel() : layout.unpadded_numel();
  ranges_.resize(layout.members().size());
  for (int64_t part = 0; part < parts_count_; ++part) {
    const auto infos = options_.sharded ? layout.shard_param_infos(part) : layout.whole_param_infos();
    for (size_t i = 0; i < infos.size(); ++i) {
      const auto& info = infos[i];
      if (info.numel_in_shard > 0) {
        ranges_[i].push_back({part, info.offset_in_shard, info.intra_param_start, info.numel_in_shard});
      }
    }
  }
}

void FlatGradReducer::join(std::shared_ptr<BufferPool> pool, std::shared_ptr<CommStreams> streams) {
  pool_ = std::move(pool);
  // With sharding the reductions use a second process group (CommStreams::second_group), so that they need not wait for
  // all-gathers of `group_`. Without sharding there are no all-gathers, so the reductions use `group_`.
  if (options_.sharded) reduces_ = streams->second_group(group_);
  stages_.set_streams(std::move(streams));
}

void FlatGradReducer::allocate_buffer() {
  if (buffer_.defined()) return;
  const c10::NoGradGuard no_grad;
  const int64_t flags = options_.flags ? static_cast<int64_t>(layout_.members().size()) : 0;
  buffer_ =
      pool_->empty(parts_count_ * (values_numel_ + flags), options_.dtype, device_, group_->allocator(device_.type()));
  buffer_.zero_();
  filled_.assign(layout_.members().size(), false);
}

void FlatGradReducer::add(size_t member, const at::Tensor& gradient) {
  const c10::NoGradGuard no_grad;
  TESSERA_CHECK(!in_flight(), ErrorKind::kInternal, "[fsdp1.backward] a gradient was added while the reduction runs");
  allocate_buffer();
  const at::Tensor source = in_storage_order(layout_.members()[member], gradient);
  const int64_t part_numel = buffer_.numel() / parts_count_;
  for (const auto& range : ranges_[member]) {
    const at::Tensor to = buffer_.narrow(0, range.part * part_numel + range.offset, range.numel);
    const at::Tensor from = source.narrow(0, range.start, range.numel);
    filled_[member] ? to.add_(from) : to.copy_(from);
  }
  filled_[member] = true;
}

void FlatGradReducer::start(double divide, const std::string& subject) {
  const c10::NoGradGuard no_grad;
  const int64_t part_numel = buffer_.numel() / parts_count_;
  // Flag i is 1 if this rank has a gradient for member i. Each rank writes its flags into every part, so each rank
  // receives the sums of all ranks' flags from the reduce-scatter.
  for (size_t i = 0; options_.flags && i < filled_.size(); ++i) {
    if (!filled_[i]) continue;
    buffer_.as_strided({parts_count_}, {part_numel}, values_numel_ + static_cast<int64_t>(i)).fill_(1);
  }
  // A sum over many ranks can overflow in float16, so a part of the division is done before the reduction and the rest
  // after it.
  double pre_divisor = 1;
  if (buffer_.scalar_type() == c10::kHalf && divide != 1.0) {
    pre_divisor = fp16_pre_divisor(divide);
    buffer_.mul_(1.0 / pre_divisor);
  }
  post_scale_ = pre_divisor / divide;
  stages_.start({.group = reduces_, .scatters = options_.sharded, .replicas = options_.replicas},
                std::exchange(buffer_, {}), *pool_, subject);
}

FlatGradReducer::ReducedGradient FlatGradReducer::finish(const std::vector<size_t>& requested_members) {
  const c10::NoGradGuard no_grad;
  const at::Tensor output = stages_.take_result();
  ReducedGradient reduced{.values = output.narrow(0, 0, values_numel_), .has_gradient = filled_};
  // The reduced flag of a member is positive if any rank had a gradient for the member. A member for which this rank
  // had a gradient has one in the result in any case; only for the other members is the flag needed. To read the flags,
  // the host must wait for the device to copy them. So the flags are copied only if `requested_members` has a member
  // without a gradient on this rank.
  if (!options_.flags) {
    reduced.has_gradient.assign(filled_.size(), true);
  } else if (!std::ranges::all_of(requested_members, [&](size_t member) { return filled_[member]; })) {
    const at::Tensor flags =
        output.narrow(0, values_numel_, static_cast<int64_t>(filled_.size())).to(at::kCPU, at::kFloat);
    for (size_t i = 0; i < filled_.size(); ++i) {
      reduced.has_gradient[i] = filled_[i] || flags.const_data_ptr<float>()[i] > 0;
    }
  }
  if (post_scale_ != 1.0) reduced.values.mul_(post_scale_);
  return reduced;
}

void FlatGradReducer::discard() {
  stages_.drop();
  buffer_.reset();
}

}  // namespace tessera
