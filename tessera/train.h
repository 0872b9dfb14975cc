// Training runs: the recipe, which holds all settings of a run, and the trainer, which runs it.
//
//   train::Trainer trainer(recipe, world);
//   trainer.run();
#pragma once

#include "tessera/data.h"
#include "tessera/parallel.h"
#include "tessera/state.h"
#include "tessera/train/recipe/recipe.h"
#include "tessera/train/recipe/recipe_print.h"
#include "tessera/train/run/trainer.h"
#include "tessera/train/step/step.h"
