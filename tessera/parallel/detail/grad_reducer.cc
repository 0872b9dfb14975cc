#include "tessera/parallel/detail/grad_reducer.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <c10/core/GradMode.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/local_part.h"
#include "tessera/mesh/host_memory.h"

namespace tessera::parallel {

GradReducer::GradReducer(MeshPtr mesh, std::shared_ptr<BufferPool> pool, std::optional<c10::ScalarType> reduce_dtype,
                         bool to_host)
    : mesh_(std::move(mesh)),
      pool_(std::move(pool)),
      reduce_dtype_(reduce_dtype),
      to_host_(to_host),
      shard_dim_(mesh_->ndim() - 1),
      reduces_(mesh_->group(shard_dim_)),
      flat_(pool_) {}

void GradReducer::join(std::shared_ptr<BufferPool> pool, std::shared_ptr<CommStreams> streams) {
  flat_.set_pool(pool);
  pool_ = std::move(pool);
  streams_ = std::move(streams);
  reduces_ = streams_->second_group(*mesh_->world(), mesh_->group(shard_dim_));
}

void GradReducer::begin(std::vector<ShardedParam>& params, const std::vector<size_t>& trainable,
                        c10::ScalarType dtype) {
  params_ = &params;
  trainable_ = trainable;
  FlatLayout layout(mesh_->size(shard_dim_));
  const auto itemsize = static_cast<int64_t>(c10::elementSize(dtype));
  for (size_t index : trainable) layout.append(params[index].rows(), params[index].row_numel(), itemsize);
  const c10::Device device = mesh_->device();
  flat_.open(std::move(layout), dtype, device, mesh_->group(shard_dim_)->allocator(device.type()));
}

void GradReducer::accumulate(std::vector<ShardedParam>& params, const std::vector<size_t>& trainable,
                             std::vector<at::Tensor>&& gradients, const std::string& subject) {
  c10::NoGradGuard no_grad;
  if (in_flight()) finish(subject);  // the group was used twice in one graph
  std::optional<c10::ScalarType> dtype;
  for (const auto& gradient : gradients) {
    if (!gradient.defined()) continue;
    TESSERA_CHECK(
        !dtype || *dtype == gradient.scalar_type(), ErrorKind::kShape,
        "[fsdp.backward] {}: gradients are {} and {}, wanted one dtype. Set MixedPrecisionPolicy::param_dtype "
        "or shard these modules separately.",
        subject, c10::toString(*dtype), c10::toString(gradient.scalar_type()));
    dtype = gradient.scalar_type();
  }
  if (!dtype) return;
  if (!flat_.is_open()) begin(params, trainable, reduce_dtype_.value_or(*dtype));
  TESSERA_CHECK(trainable == trainable_, ErrorKind::kShape,
                "[fsdp.backward] {}: requires_grad changed while gradients were accumulating without synchronisation. "
                "Run a synchronised backward first.",
                subject);
  bring_to_parameters(params, trainable, gradients, subject);
  for (auto& gradient : gradients) {
    if (gradient.defined()) gradient = local_part(gradient);
  }
  flat_.add_all(std::move(gradients));
}

// Gradients of tensor-parallel parameters, as the parameters lie. All of them start before the first is waited for.
void GradReducer::bring_to_parameters(const std::vector<ShardedParam>& params, const std::vector<size_t>& trainable,
                                      std::vector<at::Tensor>& gradients, const std::string& subject) const {
  for (size_t i = 0; i < gradients.size(); ++i) {
    const auto& param = params[trainable[i]];
    at::Tensor& gradient = gradients[i];
    if (!gradient.defined()) continue;
    const bool wanted = param.tensor_parallel && !param.tensor_parallel->plain;
    TESSERA_CHECK(
        is_dtensor(gradient) == wanted, ErrorKind::kShape,
        "[fsdp.backward] {}: the gradient of {} is {}, wanted {}. Let its module compute on DTensors alone, or "
        "on plain tensors alone.",
        subject, param.name, is_dtensor(gradient) ? "a DTensor" : "a plain tensor",
        wanted ? "a DTensor" : "a plain tensor");
    if (wanted) gradient = redistribute(gradient, param.tensor_parallel->placements, {.async_op = true});
  }
}

bool GradReducer::start(double divide, const std::string& subject) {
  if (!flat_.is_open()) return false;
  const c10::NoGradGuard no_grad;
  parts_ = flat_.close(divide);
  const int64_t ranks = mesh_->size(shard_dim_);
  if (ranks == 1) {
    output_ = parts_;
  } else {
    const c10::Device device = parts_.device();
    c10::Allocator* const sent = mesh_->ndim() == 2 ? mesh_->group(0)->allocator(device.type()) : nullptr;
    output_ = pool_->empty(parts_.numel() / ranks, parts_.scalar_type(), device, sent);
  }
  streams_->reduce.follow_current();
  if (ranks > 1) {
    const auto beside = streams_->reduce.enter();
    pending_ = comm::reduce_scatter_into(*reduces_, output_, parts_, comm::ReduceOp::kSum, subject);
  }
  stage_ = Stage::kReduceScatter;
  return true;
}

const SideStream& GradReducer::stream_of_stage() const {
  if (stage_ == Stage::kAllReduce) return streams_->replicas;
  return stage_ == Stage::kCopyToHost ? streams_->to_host : streams_->reduce;
}

bool GradReducer::advance(const std::string& subject, bool at_end) {
  if (!in_flight()) return false;
  if (stage_ == Stage::kCopyToHost && !at_end) return true;
  {
    const auto beside = stream_of_stage().enter();
    pending_.wait();
  }
  const StreamMark ended = stream_of_stage().mark();
  if (stage_ == Stage::kReduceScatter) ended.hold_current();  // whose memory the parts are
  parts_.reset();
  if (stage_ == Stage::kReduceScatter && mesh_->ndim() == 2 && mesh_->size(0) > 1) {
    stage_ = Stage::kAllReduce;
    streams_->replicas.follow(ended);
    const auto beside = streams_->replicas.enter();
    pending_ = comm::all_reduce(*mesh_->group(0), output_, comm::ReduceOp::kSum, subject);
    return true;
  }
  if (to_host_ && stage_ != Stage::kCopyToHost) {
    stage_ = Stage::kCopyToHost;
    streams_->to_host.follow(ended);
    start_copy_to_host();
    return true;
  }
  ended.hold_current();
  if (to_host_) {
    copied_.wait();
    output_ = std::exchange(host_, {});
  }
  set_gradients();
  output_.reset();
  stage_ = Stage::kIdle;
  if (hook_) {
    std::vector<at::Tensor> parameters;
    for (const size_t index : trainable_) parameters.push_back((*params_)[index].parameter);
    hook_(parameters);
  }
  return false;
}

void GradReducer::finish(const std::string& subject) {
  while (advance(subject, /*at_end=*/true)) {
  }
}

void GradReducer::start_copy_to_host() {
  const c10::NoGradGuard no_grad;
  host_ = host_empty(output_.numel(), output_.scalar_type(), mesh_->device());
  const auto beside = streams_->to_host.enter();
  host_.copy_(output_, /*non_blocking=*/true);
  copied_ = StreamMark::here(mesh_->device());
}

void GradReducer::set_gradients() {
  const c10::NoGradGuard no_grad;
  const c10::ScalarType dtype = (*params_)[trainable_[0]].dtype;
  std::vector<at::Tensor> earlier, more;
  flat_.unpack(output_, mesh_->local_rank(shard_dim_), dtype, [&](size_t index, const at::Tensor& values) {
    auto& param = (*params_)[trainable_[index]];
    const at::Tensor local = values.view(param.local.sizes());
    at::Tensor& grad = param.parameter.mutable_grad();
    if (grad.defined()) {
      earlier.push_back(to_local(grad));
      more.push_back(local);
    } else {
      grad = param.distributed(local, mesh_);
    }
  });
  if (!earlier.empty()) at::_foreach_add_(earlier, more);
}

void GradReducer::drop() {
  if (in_flight()) {
    try {
      pending_.wait();
    } catch (const Error&) {  // the error that led here has been reported already
    }
  }
  for (const auto* stream : {&streams_->reduce, &streams_->replicas, &streams_->to_host}) stream->hold_current();
  if (stage_ == Stage::kCopyToHost) copied_.wait();
  flat_.drop();
  host_.reset();
  parts_.reset();
  output_.reset();
  stage_ = Stage::kIdle;
}

}  // namespace tessera::parallel
