// The state of a Trainer and its steps. trainer_setup.cc builds and resumes a run, trainer.cc runs the loop.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/warning_log.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/data/loader/loader.h"
#include "tessera/data/rows/batch.h"
#include "tessera/models/config/config.h"
#include "tessera/models/decoder/causal_lm.h"
#include "tessera/optim/optimizer.h"
#include "tessera/optim/schedule.h"
#include "tessera/train/output/run_folder.h"
#include "tessera/train/output/run_report.h"
#include "tessera/train/profile/step_profile.h"
#include "tessera/train/run/early_stopping.h"
#include "tessera/train/run/run_layout.h"
#include "tessera/train/run/run_mesh.h"
#include "tessera/train/run/run_setup.h"
#include "tessera/train/run/trainer.h"
#include "tessera/train/step/step.h"

namespace tessera::train {

struct Trainer::Impl {
  Impl(const Recipe& recipe, std::shared_ptr<comm::World> world);

  bool is_rank_zero() const { return run_mesh.is_rank_zero(); }
  std::filesystem::path run_path() const { return recipe.checkpoint.dir; }
  void prepare();
  void resume();
  void plan_steps(int64_t count);
  RunSummary run();
  void train_step(int64_t step);
  void report_finished_steps(int steps_left_running);
  void validate(int64_t step);
  void sample(int64_t step);
  void save(int64_t step);
  void warn_changed_data();
  void set_dropout_positions();
  nlohmann::json extra_state() const;
  SessionFacts session() const;
  void wait_for_snapshot();
  TraceRecorder* recorder() const { return profile ? profile->recorder() : nullptr; }

  const std::shared_ptr<WarningLog> warnings = std::make_shared<WarningLog>();
  Recipe recipe;
  std::shared_ptr<comm::World> world;
  RunMesh run_mesh;
  RunData data;
  RunLayout layout;
  ModelConfig config;
  std::string model_identity, adapters_identity;
  std::unique_ptr<RunFolder> folder;  // rank 0 only
  std::shared_ptr<CausalLM> model;
  std::unique_ptr<optim::Optimizer> optimizer;
  std::unique_ptr<data::DataLoader> loader;
  std::unique_ptr<CheckpointWriter> checkpoints;
  std::unique_ptr<RunReport> report;  // rank 0 only
  std::unique_ptr<TrainStep> step_runner;
  std::unique_ptr<StepProfile> profile;  // null: train.profile is false
  std::optional<optim::Schedule> schedule;
  std::vector<data::Batch> validation_batches;
  std::optional<double> last_validation_loss;
  int64_t validated_step = -1;  // the step that last_validation_loss was measured after
  EarlyStopping early_stopping;
  int64_t steps = 0;
  int64_t first_step = 0;
  double snapshot_seconds = 0, checkpoint_seconds = 0;  // since the last step that reported them
  std::deque<StepMetrics> unreported_metrics;           // metrics of launched steps that await their result
  bool stop_requested = false;
  bool warned_changed_data = false;
};

}  // namespace tessera::train
