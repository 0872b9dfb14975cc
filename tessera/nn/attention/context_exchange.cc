#include "tessera/nn/attention/context_exchange.h"

#include "tessera/comm/collectives/collectives.h"

namespace tessera::nn {
namespace {

constexpr int64_t kTokenDim = 3;

at::Tensor empty_keys(const at::Tensor& kv, int64_t tokens, at::ScalarType dtype) {
  auto sizes = kv.sizes().vec();
  sizes[kTokenDim] = tokens;
  return at::empty(sizes, kv.options().dtype(dtype));
}

at::Tensor concatenated_ranges(const at::Tensor& kv, const std::vector<TokenRange>& ranges) {
  std::vector<at::Tensor> parts;
  for (const auto& each : ranges) parts.push_back(kv.narrow(kTokenDim, each.begin, each.end - each.begin));
  return parts.size() == 1 ? parts[0].contiguous() : at::cat(parts, kTokenDim);
}

// kAllGather: one all-gather of all keys and values, in the order of the sequence, and one reduce-scatter of gradients.
class AllGatherExchange final : public KeyValueExchange {
 public:
  AllGatherExchange(const ContextPattern& pattern, const at::Tensor& kv)
      : layout_(pattern.sequence->layout), group_(*pattern.sequence->context_parallel.group), kv_(kv) {}

  at::Tensor receive_step(size_t) override { return layout_.all_gather(group_, kv_, kTokenDim, kWhat); }
  void return_gradient(size_t, const at::Tensor& gradient) override {
    gradient_ = layout_.reduce_scatter(group_, gradient, kTokenDim, kWhat);
  }
  at::Tensor finish() override { return gradient_; }

 private:
  static constexpr const char* kWhat = "keys and values";
  const kernels::ContextLayout& layout_;
  comm::Group& group_;
  at::Tensor kv_, gradient_;
};

// kAllToAll: at step i, rank r receives keys of rank r - i and sends keys to rank r + i (modulo the number of ranks).
// Sender and receiver compute the sizes from the pattern, and skip empty messages. The transfer of step i + 1 runs
// while step i is computed. Of two ranks that exchange messages with each other, the lower one sends first and the
// other one receives first, so neither waits for a message that the other has not started.
class RingExchange final : public KeyValueExchange {
 public:
  RingExchange(const ContextPattern& pattern, const at::Tensor& kv)
      : pattern_(pattern), group_(*pattern.sequence->context_parallel.group), kv_(kv) {}

  at::Tensor receive_step(size_t step) override {
    if (step == 0) {
      start(1);
      return kv_;
    }
    // Start the transfer of step + 1 before waiting for the transfer of `step`, so that it runs while `step` is
    // computed.
    Transfer current = std::move(next_transfer_);
    start(step + 1);
    current.receive.wait();
    current.send.wait();
    return current.received;
  }

  void return_gradient(size_t step, const at::Tensor& gradient) override {
    if (step == 0) {
      gradient_ = gradient;
      return;
    }
    // Reverses receive_step(): the gradient goes to the rank that owns the keys, and this rank receives the gradient of
    // the keys that it sent. The transfer runs while the next step is computed.
    wait_for_gradient();
    gradient_step_ = step;
    gradient_transfer_ =
        transfer(gradient, gradient_.scalar_type(), pattern_.steps[step].sent_keys(), /*to=*/source(step),
                 /*from=*/target(step));
  }

  at::Tensor finish() override {
    wait_for_gradient();
    return gradient_;
  }

 private:
  struct Transfer {
    at::Tensor sent, received;
    comm::PendingCollective send, receive;
  };

  int source(size_t step) const { return (group_.rank() + group_.size() - static_cast<int>(step)) % group_.size(); }
  int target(size_t step) const { return (group_.rank() + static_cast<int>(step)) % group_.size(); }

  void start(size_t step) {
    next_transfer_ = Transfer();
    if (step >= pattern_.steps.size()) return;
    const auto& next = pattern_.steps[step];
    const auto sent = next.sent_ranges.empty() ? at::Tensor() : concatenated_ranges(kv_, next.sent_ranges);
    next_transfer_ = transfer(sent, kv_.scalar_type(), next.keys, target(step), source(step));
  }

  Transfer transfer(const at::Tensor& sent, at::ScalarType dtype, int64_t received_tokens, int to, int from) {
    Transfer out;
    const auto send = [&] {
      if (!sent.defined()) return;
      out.sent = sent.contiguous();
      out.send = comm::send(group_, out.sent, to);
    };
    const auto receive = [&] {
      if (received_tokens == 0) return;
      out.received = empty_keys(kv_, received_tokens, dtype);
      out.receive = comm::recv(group_, out.received, from);
    };
    if (group_.rank() < from) {
      send();
      receive();
    } else {
      receive();
      send();
    }
    return out;
  }

  // Waits for the gradient that the previous return_gradient() started to receive and adds it to this rank's gradient.
  void wait_for_gradient() {
    if (gradient_step_ == 0) return;
    gradient_transfer_.receive.wait();
    gradient_transfer_.send.wait();
    int64_t at = 0;
    for (const auto& each : pattern_.steps[gradient_step_].sent_ranges) {
      const int64_t tokens = each.end - each.begin;
      gradient_.narrow(kTokenDim, each.begin, tokens).add_(gradient_transfer_.received.narrow(kTokenDim, at, tokens));
      at += tokens;
    }
    gradient_transfer_ = Transfer();
    gradient_step_ = 0;
  }

  const ContextPattern& pattern_;
  comm::Group& group_;
  at::Tensor kv_, gradient_;
  Transfer next_transfer_, gradient_transfer_;
  size_t gradient_step_ = 0;  // 0: no transfer is running
};

}  // namespace

std::unique_ptr<KeyValueExchange> make_exchange(const ContextPattern& pattern, const at::Tensor& kv) {
  if (pattern.sequence->context_parallel.rotate == RotateMethod::kAllGather) {
    return std::make_unique<AllGatherExchange>(pattern, kv);
  }
  return std::make_unique<RingExchange>(pattern, kv);
}

}  // namespace tessera::nn
