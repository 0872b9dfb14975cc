// The training run of a recipe, on one rank of many.
//
//   train::Trainer trainer(recipe, world);    // COLLECTIVE over the world: data, model, resume
//   trainer.run();                            // COLLECTIVE over the world
//
// Writes into the run's folder (checkpoint.dir): recipe.yaml, metrics.jsonl, TensorBoard events, checkpoints/, and at
// the end model/, a Hugging Face folder. A run that is asked to stop (SIGTERM, SIGUSR1) saves and ends early.
#pragma once

#include <memory>

#include "tessera/comm/rendezvous/world.h"
#include "tessera/train/recipe/recipe.h"

namespace tessera::train {

struct RunSummary {
  int64_t first_step = 0;  // the step the run started after
  int64_t last_step = 0;
  bool stopped_early = false;  // asked to stop; the state was saved
};

class Trainer {
 public:
  // Error kConfig, kIo, kFormat, kShape for what is wrong with recipe, data, model or checkpoint, before anything is
  // written; kConfig when another run holds the folder.
  Trainer(const Recipe& recipe, std::shared_ptr<comm::World> world);
  ~Trainer();
  RunSummary run();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::train
