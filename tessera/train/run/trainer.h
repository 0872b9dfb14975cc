// Runs the training of a recipe. Each rank of the run has one Trainer.
//
//   train::Trainer trainer(recipe, world);    // COLLECTIVE over the world: data, model, resume
//   trainer.run();                            // COLLECTIVE over the world
//
// Writes into the folder of the run (checkpoint.dir): recipe.yaml, metrics.jsonl, TensorBoard events, checkpoints/, and
// at the end model/, a Hugging Face folder. On SIGTERM or SIGUSR1 the run saves a checkpoint and ends early.
#pragma once

#include <memory>

#include "tessera/comm/rendezvous/world.h"
#include "tessera/train/recipe/recipe.h"

namespace tessera::train {

struct RunSummary {
  int64_t first_step = 0;  // the step that the run resumed after; 0 for a new run
  int64_t last_step = 0;
  bool stopped_early = false;  // a signal stopped the run; the state was saved
};

class Trainer {
 public:
  // Loads data and model and resumes. Error kConfig, kIo, kFormat or kShape for a fault in recipe, data, model or
  // checkpoint, before anything of the run is written; kConfig also when another run has locked the folder. COLLECTIVE
  // over the world.
  Trainer(const Recipe& recipe, std::shared_ptr<comm::World> world);
  ~Trainer();
  // Trains all remaining steps. COLLECTIVE over the world.
  RunSummary run();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::train
