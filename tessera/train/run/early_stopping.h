// Decides whether a run ends because its validation loss no longer falls.
//
//   EarlyStopping stopping({.patience = 3, .min_delta = 0.01});
//   stopping.add_validation(step, loss);      // after each validation
//   if (stopping.is_over()) ...
//
// The decision depends only on the losses. Ranks that add the same losses therefore end in the same step. Plain data;
// no communication.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

namespace tessera::train {

struct EarlyStoppingOptions {
  int64_t patience = 0;  // the run ends after so many validations in a row without a better loss; 0: never
  double min_delta = 0;  // a loss is better if it is lower than the best loss by more than this
};

class EarlyStopping {
 public:
  explicit EarlyStopping(const EarlyStoppingOptions& options) : options_(options) {}
  // Adds the validation loss measured after `step`. A loss that is not finite counts as not better.
  void add_validation(int64_t step, double loss);
  bool is_over() const { return options_.patience > 0 && without_better_ >= options_.patience; }
  // "validation loss has not fallen below 2.3100 (after step 40) in 3 validations"
  std::string reason() const;

  // The state for checkpoints: the best loss, its step, and the number of validations since. Options are not part of
  // the state.
  nlohmann::json state() const;
  // Error kFormat for JSON of another form than that of state().
  void load_state(const nlohmann::json& state);

 private:
  EarlyStoppingOptions options_;
  std::optional<double> best_;
  int64_t best_step_ = 0;
  int64_t without_better_ = 0;
};

}  // namespace tessera::train
