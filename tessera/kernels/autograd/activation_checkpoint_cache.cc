#include "tessera/kernels/autograd/kept_results.h"

#include "tessera/base/error.h"

namespace tessera::kernels {
namespace {

KeptResults*& results_in_force() {
  thread_local KeptResults* results = nullptr;
  return results;
}

}  // namespace

KeptResults::Scope::Scope(std::shared_ptr<KeptResults> results, Mode mode)
    : results_(std::move(results)), before_(results_in_force()) {
  if (results_) {
    results_->mode_ = mode;
    results_->products_ = 0;
    results_->taken_ = 0;
  }
  results_in_force() = results_.get();
}

void KeptResults::Scope::end() {
  if (ended_) return;
  ended_ = true;
  results_in_force() = before_;
}

KeptResults* KeptResults::current() { return results_in_force(); }

std::vector<at::Tensor> KeptResults::next() {
  TESSERA_CHECK(
      taken_ < results_.size(), ErrorKind::kInternal,
      "[kernels.kept_results] found more kernel calls in the second forward than the {} results that the first "
      "forward kept. Forward must call the same kernels both times.",
      results_.size());
  return std::move(results_[taken_++]);
}

std::vector<at::Tensor> KeptResults::computed_or_kept(const std::function<std::vector<at::Tensor>()>& compute) {
  auto* const kept = current();
  if (kept != nullptr && kept->mode() == Mode::kReplay) return kept->next();
  auto results = compute();
  if (kept != nullptr) kept->keep(results);
  return results;
}

}  // namespace tessera::kernels
