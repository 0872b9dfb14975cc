// Whether a run should end because its validation loss no longer falls.
//
//   EarlyStopping stopping({.patience = 3, .min_delta = 0.01});
//   stopping.add(step, loss);                 // after each validation
//   if (stopping.is_over()) ...
//
// The same losses give the same answer, so that ranks that measure together end together. Plain data; no communication.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

namespace tessera::train {

struct EarlyStoppingOptions {
  int64_t patience = 0;  // validations in a row without a better loss that end the run; 0: none do
  double min_delta = 0;  // a loss is better when it is lower than the best by more than this
};

class EarlyStopping {
 public:
  explicit EarlyStopping(const EarlyStoppingOptions& options) : options_(options) {}
  // A loss that is not finite is none.
  void add(int64_t step, double loss);
  bool is_over() const { return options_.patience > 0 && without_better_ >= options_.patience; }
  // "validation loss has not fallen below 2.3100 (after step 40) in 3 validations"
  std::string reason() const;

  // For checkpoints: the best loss and how many validations came since, whatever the patience.
  nlohmann::json state() const;
  // Error kFormat for what state() did not give.
  void load_state(const nlohmann::json& state);

 private:
  EarlyStoppingOptions options_;
  std::optional<double> best_;
  int64_t best_step_ = 0;
  int64_t without_better_ = 0;
};

}  // namespace tessera::train
