#include "tessera/nn/attention/context_exchange.h"

#include "tessera/comm/collectives/collectives.h"

namespace tessera::nn {
namespace {

constexpr int64_t kTokenDim = 3;

at::Tensor sized_as(const at::Tensor& kv, int64_t tokens, at::ScalarType dtype) {
  auto sizes = kv.sizes().vec();
  sizes[kTokenDim] = tokens;
  return at::empty(sizes, kv.options().dtype(dtype));
}

at::Tensor picked(const at::Tensor& kv, const std::vector<TokenRange>& ranges) {
  std::vector<at::Tensor> parts;
  for (const auto& each : ranges) parts.push_back(kv.narrow(kTokenDim, each.begin, each.end - each.begin));
  return parts.size() == 1 ? parts[0].contiguous() : at::cat(parts, kTokenDim);
}

// kAllGather: one all-gather of all keys and values, in the order of the sequence, and one reduce-scatter of gradients.
class GatheredKeys final : public KeyExchange {
 public:
  GatheredKeys(const ContextPattern& pattern, const at::Tensor& kv)
      : layout_(pattern.sequence->layout), group_(*pattern.sequence->how.group), kv_(kv) {}

  at::Tensor take(size_t) override { return layout_.gathered(group_, kv_, kTokenDim, kWhat); }
  void give_back(size_t, const at::Tensor& gradient) override {
    gradient_ = layout_.scattered_sum(group_, gradient, kTokenDim, kWhat);
  }
  at::Tensor finish() override { return gradient_; }

 private:
  static constexpr const char* kWhat = "keys and values";
  const kernels::ContextLayout& layout_;
  comm::Group& group_;
  at::Tensor kv_, gradient_;
};

// kAllToAll: at step i this rank receives from the rank i before it and sends to the rank i after it. Both sides
// compute the sizes from the pattern, and skip empty messages. The transfer of step i + 1 runs while step i is
// computed. Of two ranks that exchange messages with each other, the lower one sends first and the other one receives
// first, so neither waits for a message that the other has not started.
class RotatedKeys final : public KeyExchange {
 public:
  RotatedKeys(const ContextPattern& pattern, const at::Tensor& kv)
      : pattern_(pattern), group_(*pattern.sequence->how.group), kv_(kv) {}

  at::Tensor take(size_t step) override {
    if (step == 0) {
      start(1);
      return kv_;
    }
    // The transfer of the next step starts before the wait for this one, so that it runs during this step's attention.
    Transfer current = std::move(coming_);
    start(step + 1);
    current.receive.wait();
    current.send.wait();
    return current.received;
  }

  void give_back(size_t step, const at::Tensor& gradient) override {
    if (step == 0) {
      gradient_ = gradient;
      return;
    }
    // Reverses take(): the gradient goes to the rank that owns the keys, and this rank receives the gradient of the
    // keys that it sent. The transfer runs while the next step is computed.
    const auto& given = pattern_.steps[step];
    settle();
    homecoming_step_ = step;
    homecoming_ = transfer(gradient, gradient_.scalar_type(), given.keys_given(), /*to=*/source(step),
                           /*from=*/target(step));
  }

  at::Tensor finish() override {
    settle();
    return gradient_;
  }

 private:
  struct Transfer {
    at::Tensor sent, received;
    comm::Pending send, receive;
  };

  int source(size_t step) const { return (group_.rank() + group_.size() - static_cast<int>(step)) % group_.size(); }
  int target(size_t step) const { return (group_.rank() + static_cast<int>(step)) % group_.size(); }

  void start(size_t step) {
    coming_ = Transfer();
    if (step >= pattern_.steps.size()) return;
    const auto& wanted = pattern_.steps[step];
    const auto given = wanted.given.empty() ? at::Tensor() : picked(kv_, wanted.given);
    coming_ = transfer(given, kv_.scalar_type(), wanted.keys, target(step), source(step));
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
      out.received = sized_as(kv_, received_tokens, dtype);
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

  // Waits for the gradient that the previous give_back() started to receive and adds it to this rank's gradient.
  void settle() {
    if (homecoming_step_ == 0) return;
    homecoming_.receive.wait();
    homecoming_.send.wait();
    int64_t at = 0;
    for (const auto& each : pattern_.steps[homecoming_step_].given) {
      const int64_t tokens = each.end - each.begin;
      gradient_.narrow(kTokenDim, each.begin, tokens).add_(homecoming_.received.narrow(kTokenDim, at, tokens));
      at += tokens;
    }
    homecoming_ = Transfer();
    homecoming_step_ = 0;
  }

  const ContextPattern& pattern_;
  comm::Group& group_;
  at::Tensor kv_, gradient_;
  Transfer coming_, homecoming_;
  size_t homecoming_step_ = 0;  // 0: no transfer is running
};

}  // namespace

std::unique_ptr<KeyExchange> make_exchange(const ContextPattern& pattern, const at::Tensor& kv) {
  if (pattern.sequence->how.rotate == RotateMethod::kAllGather) return std::make_unique<GatheredKeys>(pattern, kv);
  return std::make_unique<RotatedKeys>(pattern, kv);
}

}  // namespace tessera::nn
