// The results that selective activation checkpointing keeps: results of attention and of every second matrix product.
// The first forward records them; the recomputation in backward replays them.
//
//   using Cache = ActivationCheckpointCache;
//   auto cache = std::make_shared<Cache>();
//   { Cache::Scope record(cache, Cache::Mode::kRecord); forward(); }     // without autograd
//   { Cache::Scope replay(cache, Cache::Mode::kReplay); forward(); }     // with autograd; reuses the results
//
// A Scope applies to the thread that made it, until its end. Kernels read current(). Both forwards must call the
// kernels in the same order. An object belongs to one rank and one forward.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace tessera::kernels {

class ActivationCheckpointCache {
 public:
  enum class Mode { kRecord, kReplay };
  class Scope {
   public:
    // If `results` is null, no results are kept in this scope, even inside an outer scope.
    Scope(std::shared_ptr<ActivationCheckpointCache> results, Mode mode);
    ~Scope() { end(); }
    void end();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    std::shared_ptr<ActivationCheckpointCache> results_;
    ActivationCheckpointCache* before_;
    bool ended_ = false;
  };
  // The cache of the innermost Scope on this thread; null: results are not kept.
  static ActivationCheckpointCache* current();

  Mode mode() const { return mode_; }
  // Returns whether the result of the next matrix product is kept: true for every second call.
  bool caches_next_product() { return products_++ % 2 == 1; }
  void keep(std::vector<at::Tensor> results) { results_.push_back(std::move(results)); }
  // Returns the next kept result. Error kInternal when no result is left.
  std::vector<at::Tensor> next();
  // In a scope with kReplay: returns the next kept result and does not call compute(). Otherwise: returns compute(),
  // and in a scope with kRecord also keeps its result.
  static std::vector<at::Tensor> cached_or_computed(const std::function<std::vector<at::Tensor>()>& compute);

 private:
  Mode mode_ = Mode::kRecord;
  int64_t products_ = 0;
  size_t taken_ = 0;
  std::vector<std::vector<at::Tensor>> results_;
};

}  // namespace tessera::kernels
