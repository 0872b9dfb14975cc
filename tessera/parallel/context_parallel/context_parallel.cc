#include "tessera/parallel/context_parallel/context_parallel.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/kernels/attention/context_layout.h"
#include "tessera/nn/attention/context_parallel_guard.h"
#include "tessera/parallel/modules/check_mesh.h"

namespace tessera {
namespace {

thread_local nn::RotateMethod scope_rotate_method = nn::RotateMethod::kAllGather;

bool contains_tensor(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor) {
  return std::ranges::any_of(tensors, [&](const at::Tensor& each) { return each.is_same(tensor); });
}

void check_sequences(const char* verb, const std::vector<at::Tensor>& buffers, const std::vector<int64_t>& seq_dims) {
  TESSERA_CHECK(buffers.size() == seq_dims.size(), ErrorKind::kShape,
                "[parallel.{}] `seq_dims` must have the same number of elements as `buffers`. Found {} and {}.", verb,
                seq_dims.size(), buffers.size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    const auto& buffer = buffers[i];
    TESSERA_CHECK(
        buffer.defined() && !is_dtensor(buffer) && -buffer.dim() <= seq_dims[i] && seq_dims[i] < buffer.dim() &&
            buffer.size(seq_dims[i]) == buffers[0].size(seq_dims[0]),
        ErrorKind::kShape,
        "[parallel.{}] buffer {}: found sequence dim {} of {}, wanted a dim of a plain tensor with the size of "
        "the first buffer's sequence dim.",
        verb, i, seq_dims[i],
        !buffer.defined()    ? "none"
        : is_dtensor(buffer) ? "a DTensor"
                             : c10::str(buffer.sizes()));
  }
}

// Replaces the data of the tensor and increments its version counter. set_data() alone does not increment it, and
// backward through a graph that saved the tensor would then use the new data without an error.
void replace_data(const at::Tensor& buffer, const at::Tensor& data) {
  buffer.set_data(data);
  buffer.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

ContextParallel::ContextParallel(const MeshPtr& mesh, const ContextParallelOptions& options) {
  check_one_dim_mesh(mesh, "parallel.context_parallel", "cp");
  const auto &buffers = options.buffers, &no_restore = options.no_restore_buffers;
  TESSERA_CHECK(
      !buffers.empty(), ErrorKind::kShape,
      "[parallel.context_parallel] found no buffers. The length of the sequence is taken from the first buffer: pass "
      "the tokens or the positions.");
  check_sequences("context_parallel", buffers, options.buffer_seq_dims);
  for (const auto& buffer : buffers) {
    TESSERA_CHECK(!buffer.requires_grad(), ErrorKind::kShape,
                  "[parallel.context_parallel] found a buffer {} that needs a gradient. Shard it with "
                  "ContextLayout::shard, which is differentiable.",
                  c10::str(buffer.sizes()));
  }
  for (const auto& buffer : no_restore) {
    TESSERA_CHECK(contains_tensor(buffers, buffer), ErrorKind::kShape,
                  "[parallel.context_parallel] `no_restore_buffers` must be a subset of `buffers`. Found a tensor of "
                  "shape {} that "
                  "is not in `buffers`.",
                  buffer.defined() ? c10::str(buffer.sizes()) : "no tensor");
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    const auto is_same = [&](const at::Tensor& other) { return other.is_same(buffers[i]); };
    TESSERA_CHECK(std::ranges::count_if(buffers, is_same) == 1, ErrorKind::kShape,
                  "[parallel.context_parallel] found buffer {}, {}, more than once, wanted each once.", i,
                  c10::str(buffers[i].sizes()));
  }
  // The shards and the ContextParallelGuard are made before the first buffer is replaced, so an error leaves all
  // buffers unchanged.
  const auto layout = kernels::ContextLayout::of_pytorch(buffers[0].size(options.buffer_seq_dims[0]), mesh->size());
  const nn::ContextParallelGroup context_options{.group = mesh->group(0), .rotate = scope_rotate_method};
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < buffers.size(); ++i) {
    parts.push_back(layout.shard(buffers[i].detach(), options.buffer_seq_dims[i], mesh->local_rank(0)));
  }
  scope_ = std::make_unique<nn::ContextParallelGuard>(context_options, layout);
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (!contains_tensor(no_restore, buffers[i])) saved_buffers_.push_back({buffers[i], buffers[i].detach()});
    replace_data(buffers[i], parts[i]);
  }
}

ContextParallel::~ContextParallel() {
  scope_.reset();
  const c10::NoGradGuard no_grad;
  // scope_ is destroyed before the buffers are restored, so that no attention over the ranks reads the unsharded
  // buffers.
  for (const auto& each : saved_buffers_) replace_data(each.buffer, each.whole);
}

at::Tensor scaled_dot_product_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                        const ScaledDotProductAttentionOptions& options) {
  const bool grouped = q.dim() == 4 && k.dim() == 4 && q.size(1) != k.size(1);
  TESSERA_CHECK(!grouped || options.enable_gqa, ErrorKind::kShape,
                "[parallel.scaled_dot_product_attention] found {} query heads and {} of keys. Set enable_gqa.",
                q.size(1), k.size(1));
  if (const auto* scope = nn::ContextParallelGuard::current()) {
    return scope->scaled_dot_product_attention(q, k, v, options.is_causal, {.scale = options.scale});
  }
  const auto scale = options.scale > 0 ? std::optional<double>(options.scale) : std::nullopt;
  return at::scaled_dot_product_attention(q, k, v, /*attn_mask=*/std::nullopt, /*dropout_p=*/0.0, options.is_causal,
                                          scale, options.enable_gqa);
}

std::vector<at::Tensor> context_parallel_unshard(const MeshPtr& mesh, const std::vector<at::Tensor>& buffers,
                                                 const std::vector<int64_t>& seq_dims) {
  check_one_dim_mesh(mesh, "parallel.context_parallel_unshard", "cp");
  check_sequences("context_parallel_unshard", buffers, seq_dims);
  if (buffers.empty()) return {};
  const c10::NoGradGuard no_grad;
  const auto& group = mesh->group(0);
  // Shards may have uneven lengths, so the length of the sequence is the sum over the ranks.
  const auto tokens = at::full({1}, buffers[0].size(seq_dims[0]), at::kLong).to(mesh->device());
  comm::all_reduce(*group, tokens, comm::ReduceOp::kSum, "context_parallel_unshard").wait();
  const auto layout = kernels::ContextLayout::of_pytorch(tokens.item<int64_t>(), mesh->size());
  std::vector<at::Tensor> whole;
  for (size_t i = 0; i < buffers.size(); ++i) whole.push_back(layout.unshard(group, buffers[i].detach(), seq_dims[i]));
  return whole;
}

void set_rotate_method(std::string_view rotate_method) { scope_rotate_method = nn::rotate_method_of(rotate_method); }

}  // namespace tessera
