// Results that selective activation checkpointing keeps: those of attention and of every second product.
//
//   auto kept = std::make_shared<KeptResults>();
//   { KeptResults::Scope record(kept, KeptResults::Mode::kRecord); forward(); }     // without autograd
//   { KeptResults::Scope replay(kept, KeptResults::Mode::kReplay); forward(); }     // with it; does not compute them
//
// In force on the thread that made the scope, until its end. Kernels that take part ask current(); both forwards must
// call them in the same order. One rank and forward.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace tessera::kernels {

class KeptResults {
 public:
  enum class Mode { kRecord, kReplay };
  class Scope {
   public:
    // Null: nothing is kept while it lives, whatever is in force around it.
    Scope(std::shared_ptr<KeptResults> results, Mode mode);
    ~Scope() { end(); }
    void end();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    std::shared_ptr<KeptResults> results_;
    KeptResults* before_;
    bool ended_ = false;
  };
  // What is in force on this thread; null: nothing.
  static KeptResults* current();

  Mode mode() const { return mode_; }
  // Whether the product that is about to run is one of those that are kept: every second one.
  bool keeps_next_product() { return products_++ % 2 == 1; }
  void keep(std::vector<at::Tensor> results) { results_.push_back(std::move(results)); }
  // The results that were kept next. Error kInternal when there are no more.
  std::vector<at::Tensor> next();
  // The results of `compute`, which are kept where current() records, or those that were kept where it replays.
  static std::vector<at::Tensor> computed_or_kept(const std::function<std::vector<at::Tensor>()>& compute);

 private:
  Mode mode_ = Mode::kRecord;
  int64_t products_ = 0;
  size_t taken_ = 0;
  std::vector<std::vector<at::Tensor>> results_;
};

}  // namespace tessera::kernels
