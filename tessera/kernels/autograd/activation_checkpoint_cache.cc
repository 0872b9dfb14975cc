#include "tessera/kernels/autograd/activation_checkpoint_cache.h"

#include "tessera/base/error.h"

namespace tessera::kernels {
namespace {

ActivationCheckpointCache*& results_in_force() {
  thread_local ActivationCheckpointCache* results = nullptr;
  return results;
}

}  // namespace

ActivationCheckpointCache::Scope::Scope(std::shared_ptr<ActivationCheckpointCache> results, Mode mode)
    : results_(std::move(results)), before_(results_in_force()) {
  if (results_) {
    results_->mode_ = mode;
    results_->products_ = 0;
    results_->taken_ = 0;
  }
  results_in_force() = results_.get();
}

void ActivationCheckpointCache::Scope::end() {
  if (ended_) return;
  ended_ = true;
  results_in_force() = before_;
}

ActivationCheckpointCache* ActivationCheckpointCache::current() { return results_in_force(); }

std::vector<at::Tensor> ActivationCheckpointCache::next() {
  TESSERA_CHECK(taken_ < results_.size(), ErrorKind::kInternal,
                "[kernels.activation_checkpoint] found more kernel calls in the second forward than the {} results "
                "that the first "
                "forward kept. Forward must call the same kernels both times.",
                results_.size());
  return std::move(results_[taken_++]);
}

std::vector<at::Tensor> ActivationCheckpointCache::cached_or_computed(
    const std::function<std::vector<at::Tensor>()>& compute) {
  auto* const kept = current();
  if (kept != nullptr && kept->mode() == Mode::kReplay) return kept->next();
  auto results = compute();
  if (kept != nullptr) kept->keep(results);
  return results;
}

}  // namespace tessera::kernels
