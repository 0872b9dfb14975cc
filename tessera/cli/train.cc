#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/cli/flags.h"
#include "tessera/cli/ranks.h"
#include "tessera/cli/verbs.h"
#include "tessera/comm/collectives/agreement.h"
#include "tessera/report/live_page.h"
#include "tessera/train/recipe/recipe.h"
#include "tessera/train/recipe/recipe_print.h"
#include "tessera/train/run/check_run.h"
#include "tessera/train/run/model_source.h"
#include "tessera/train/run/trainer.h"

namespace tessera::cli {

int run_train(VerbArguments args) {
  const auto app = make_app("train");
  std::string recipe_path;
  std::vector<std::string> overrides;
  int64_t nproc = 1;
  bool print_config = false, check = false, recipe_docs = false;
  app->add_option("RECIPE", recipe_path, "Recipe, a YAML file");
  app->add_option("overrides", overrides, "Settings that replace those of the recipe")
      ->option_text("[section.key=value ...]");
  app->add_option("--nproc", nproc, "Local ranks to start")->option_text("N");
  LaunchFlags launch;
  add_launch_flags(*app, launch);
  app->add_flag("--print-config", print_config, "Print every setting with its value and meaning; do not train");
  app->add_flag("--check", check, "Check recipe, data, model and layout; do not train");
  app->add_flag("--recipe-docs", recipe_docs, "Print docs/recipe.md");
  app->footer(train::recipe_help());
  if (const auto code = parse_flags(*app, args)) return *code;
  if (recipe_docs) {
    std::fputs(train::recipe_docs().c_str(), stdout);
    return 0;
  }
  TESSERA_CHECK(
      !recipe_path.empty(), ErrorKind::kConfig,
      "[train] no recipe given. Usage: tessera train RECIPE.yaml [section.key=value ...]; see 'tessera train --help'.");
  auto recipe = train::read_recipe(recipe_path, overrides);
  if (print_config) {
    std::fputs(train::to_yaml(recipe).c_str(), stdout);
    return 0;
  }
  train::resolve_model_source(recipe);
  if (check) {
    train::check_run(recipe, std::max<int64_t>(nproc, 1));
    return 0;
  }
  TESSERA_CHECK(launch.max_restarts == 0 || recipe.checkpoint.resume == "auto", ErrorKind::kConfig,
                "[train] --max-restarts with checkpoint.resume: found '{}', wanted auto: restarted ranks resume from "
                "the newest checkpoint",
                recipe.checkpoint.resume);
  train::check_run_folder(recipe);  // before ranks start: a rank that fails writes flight records into the folder
  if (const auto code = launch_ranks("train", args, nproc, launch, recipe.checkpoint.dir + "/checkpoints")) {
    return *code;
  }
  // From here on this process is a rank. Everything before ran in the launcher as well, and again in each rank.
  const auto world = comm::World::connect({.backend = recipe.comm.backend,
                                           .timeout = std::chrono::seconds(recipe.comm.timeout_seconds),
                                           .check = recipe.comm.check,
                                           .trace_folder = recipe.checkpoint.dir + "/trace"});
  // The port of the live page (train.page) is bound before data and model are loaded, so that all ranks end at once if
  // the port is in use.
  std::unique_ptr<report::LivePage> page;
  comm::attempt_together(*world->group(), [&] {
    if (world->rank() != 0 || recipe.train.page == 0) return;
    page = std::make_unique<report::LivePage>(static_cast<uint16_t>(recipe.train.page), recipe.checkpoint.dir);
    log_info("[report.live] the page of the run is at http://127.0.0.1:{}", recipe.train.page);
  });
  train::Trainer(recipe, world).run();
  return 0;
}

}  // namespace tessera::cli
