#include "tessera/parallel/pipeline/detail/stage_channel.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <fmt/ranges.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/local_tensor.h"

namespace tessera::pipeline::detail {
namespace {

// The header: dtype, is_dtensor, shard dim or -1, number of dims, local sizes, global sizes; int64 each.
constexpr size_t kDims = 3, kHeader = 4 + 2 * kDims;
enum MessageKind : int { kHeaderMessage, kForwardMessage, kBackwardMessage, kMessageKinds };

Placements placements_of(const HiddenStateForm& form) {
  return {form.shard_dim ? Placement(Shard(*form.shard_dim)) : Placement(Replicate())};
}

at::Tensor header_of(const HiddenStateForm& form) {
  auto header = at::empty({static_cast<int64_t>(kHeader)}, at::kLong);
  auto* words = header.mutable_data_ptr<int64_t>();
  words[0] = static_cast<int64_t>(form.dtype);
  words[1] = form.is_dtensor;
  words[2] = form.shard_dim.value_or(-1);
  words[3] = static_cast<int64_t>(kDims);
  std::copy(form.local.begin(), form.local.end(), words + 4);
  std::copy(form.whole.begin(), form.whole.end(), words + 4 + kDims);
  return header;
}

HiddenStateForm form_of_header(const at::Tensor& header, bool tensor_parallel) {
  const auto* words = header.const_data_ptr<int64_t>();
  HiddenStateForm form{.dtype = static_cast<c10::ScalarType>(words[0])};
  form.is_dtensor = words[1] != 0;
  if (words[2] >= 0) form.shard_dim = words[2];
  TESSERA_CHECK(words[3] == static_cast<int64_t>(kDims) && c10::isFloatingType(form.dtype), ErrorKind::kComm,
                "[pipeline.receive] hidden states: the sender announced {} dims and dtype {}, wanted a floating [B, T, "
                "hidden_size]. Run the same program on all ranks.",
                words[3], words[0]);
  TESSERA_CHECK(
      !form.is_dtensor || tensor_parallel, ErrorKind::kShape,
      "[pipeline.receive] hidden states: the previous stage sends DTensors, but this stage has no tensor-parallel "
      "mesh. Use the same plan for all stages.");
  form.local.assign(words + 4, words + 4 + kDims);
  form.whole.assign(words + 4 + kDims, words + kHeader);
  return form;
}

}  // namespace

at::Tensor PendingHiddenState::wait_for_tensor() {
  pending.wait();
  if (!form.is_dtensor) return std::move(part);
  const c10::NoGradGuard no_grad;
  return from_local(part, tensor_parallel, placements_of(form), FromLocalOptions::contiguous(form.whole));
}

HiddenStateForm StageChannel::form_of(const at::Tensor& hidden) {
  const at::Tensor local = tessera::local_tensor_of(hidden);
  TESSERA_CHECK(hidden.dim() == static_cast<int64_t>(kDims), ErrorKind::kShape,
                "[pipeline.send] hidden states: found {} dims, wanted [B, T, hidden_size]", hidden.dim());
  HiddenStateForm form{.dtype = hidden.scalar_type(), .local = local.sizes().vec(), .whole = hidden.sizes().vec()};
  form.is_dtensor = is_dtensor(hidden);
  if (!form.is_dtensor) return form;
  const auto lies = placements(hidden);
  TESSERA_CHECK(
      lies.size() == 1 && (lies[0].is_replicate() || lies[0].is_shard()), ErrorKind::kShape,
      "[pipeline.send] hidden states: found placements {} over {}, wanted Replicate or Shard over the tensor-parallel "
      "dim alone",
      to_string(lies), device_mesh(hidden)->to_string());
  if (lies[0].is_shard()) form.shard_dim = lies[0].dim;
  return form;
}

// A tag for each kind of message, receiving stage and micro-batch; up to 4096 stages.
int StageChannel::tag_of(const Address& address, int kind) const {
  return (address.micro_batch * 4096 + address.stage) * kMessageKinds + kind;
}

// The PendingCollective keeps the sent tensor alive until the message has been read.
void StageChannel::send(const at::Tensor& part, int to, int tag) {
  sends_.push_back(comm::send(*group_, part, to, tag));
}

// Returns the contiguous local tensor of `tensor`, a hidden state or the gradient of one, for sending. A gradient may
// have other placements than its hidden state (Partial, for example). So a DTensor is first redistributed to the
// placements in `form`, the HiddenStateForm that the header message announced.
at::Tensor StageChannel::local_tensor_for_send(const at::Tensor& tensor, const HiddenStateForm& form) const {
  at::Tensor placed = tensor;
  if (is_dtensor(tensor)) {
    if (form.is_dtensor) placed = redistribute(tensor, placements_of(form));
    placed = tessera::local_tensor_of(placed);
  }
  TESSERA_CHECK(
      is_dtensor(tensor) == form.is_dtensor && placed.sizes() == at::IntArrayRef(form.local) &&
          placed.scalar_type() == form.dtype,
      ErrorKind::kShape,
      "[pipeline.send] found {} [{}] of {}, wanted {} [{}] of {}: all hidden states and gradients for one token shape "
      "must have the same form",
      is_dtensor(tensor) ? "a DTensor's part" : "a tensor", fmt::join(placed.sizes(), ", "),
      c10::toString(placed.scalar_type()), form.is_dtensor ? "a DTensor's part" : "a tensor",
      fmt::join(form.local, ", "), c10::toString(form.dtype));
  return placed.contiguous();
}

void StageChannel::send_forward(const Address& to, const at::Tensor& hidden, c10::IntArrayRef tokens) {
  const c10::NoGradGuard no_grad;
  // `tokens` are the sizes of the micro-batch's tokens. For each pair of receiving stage and token sizes, the sender
  // sends a header message with the HiddenStateForm before the first hidden state. These pairs are the keys of
  // sent_forms_ on the sender and of received_forms_ on the receiver. Both maps have the same keys, so both ranks know
  // whether a header is sent.
  const auto [known, fresh] = sent_forms_.try_emplace({to.stage, tokens.vec()});
  if (fresh) {
    known->second = form_of(hidden);
    send(header_of(known->second).to(device_), to.rank, tag_of(to, kHeaderMessage));
  }
  send(local_tensor_for_send(hidden, known->second), to.rank, tag_of(to, kForwardMessage));
}

PendingHiddenState StageChannel::receive_forward(const Address& from, c10::IntArrayRef tokens) {
  const auto [known, fresh] = received_forms_.try_emplace({from.stage, tokens.vec()});
  if (fresh) {
    auto header = at::empty({static_cast<int64_t>(kHeader)}, at::TensorOptions(at::kLong).device(device_));
    comm::recv(*group_, header, from.rank, tag_of(from, kHeaderMessage)).wait();
    known->second = form_of_header(header.to(at::kCPU), tensor_parallel_ != nullptr);
  }
  const auto& form = known->second;
  auto part = at::empty(form.local, at::TensorOptions(form.dtype).device(device_));
  // This function waits for the header alone. The hidden state arrives while the rank computes;
  // PendingHiddenState::wait_for_tensor() waits for it.
  auto pending = comm::recv(*group_, part, from.rank, tag_of(from, kForwardMessage));
  return {std::move(part), std::move(pending), form, tensor_parallel_};
}

void StageChannel::send_backward(const Address& to, const at::Tensor& gradient, c10::IntArrayRef tokens) {
  const c10::NoGradGuard no_grad;
  // This rank received the hidden state as the input of stage to.stage + 1. The gradient is sent back in the same
  // HiddenStateForm.
  const auto& form = received_forms_.at({to.stage + 1, tokens.vec()});
  send(local_tensor_for_send(gradient, form), to.rank, tag_of(to, kBackwardMessage));
}

PendingHiddenState StageChannel::receive_backward(const Address& from, c10::IntArrayRef tokens) {
  // The gradient that is received here is that of the hidden state that this rank sent to stage from.stage + 1, so it
  // has the HiddenStateForm of that hidden state.
  const auto& form = sent_forms_.at({from.stage + 1, tokens.vec()});
  auto part = at::empty(form.local, at::TensorOptions(form.dtype).device(device_));
  auto pending = comm::recv(*group_, part, from.rank, tag_of(from, kBackwardMessage));
  return {std::move(part), std::move(pending), form, tensor_parallel_};
}

void StageChannel::release_sent() {
  std::erase_if(sends_, [](const comm::PendingCollective& each) { return each.done(); });
}

void StageChannel::finish() {
  for (auto& each : sends_) each.wait();
  sends_.clear();
}

void StageChannel::abort_group() {
  group_->abort();
  sends_.clear();
}

}  // namespace tessera::pipeline::detail
