#include "tessera/train/run/check_run.h"

#include <filesystem>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/text/count_text.h"
#include "tessera/models/files/weights.h"
#include "tessera/train/output/run_mark.h"
#include "tessera/train/recipe/recipe_print.h"
#include "tessera/train/recipe/recipe_schedule.h"
#include "tessera/train/run/recipe_notes.h"
#include "tessera/train/run/run_layout.h"
#include "tessera/train/run/run_setup.h"

namespace tessera::train {

void check_run_folder(const Recipe& recipe) {
  const std::filesystem::path dir = recipe.checkpoint.dir;
  const RunMark mark(dir);
  if (!mark.is_set() && std::filesystem::is_directory(dir)) mark.check_names_unused();
  const auto exported = std::filesystem::weakly_canonical(dir / "model");
  for (const auto& [key, path] : {std::pair("model.path", recipe.model.path), {"model.lora.path", recipe.lora.path}}) {
    TESSERA_CHECK(
        recipe.checkpoint.export_model == "never" || path.empty() ||
            std::filesystem::weakly_canonical(path) != exported,
        ErrorKind::kConfig,
        "[train.run_folder] {}: {} is where this run would export its own model to. Choose another checkpoint.dir.",
        key, path);
  }
}

void check_run(const Recipe& recipe, int64_t world_size) {
  // Cheap checks first, so that a wrong layout is found before data is tokenized. One rank of each pipeline stage is
  // checked: the ranks of a stage have the same modules, and only the first one prints warnings.
  const auto layout = resolve_layout(recipe, world_size);
  const auto config = load_model_config(recipe);
  check_layout(recipe, layout, config);
  for (int64_t stage = 0; stage < layout.pp; ++stage) {
    check_parallel_model(recipe, layout, config, stage * layout.ranks_of_stage());
  }
  check_parameter_groups(recipe, config);
  const auto model = make_model(config, {.device = c10::Device(at::kMeta)});
  if (recipe.model.init == "pretrained") check_pretrained(*model, weights_path(recipe));
  const auto data = load_run_data(recipe);
  const int64_t parameters = count_parameters(*model);
  const auto adapters = describe_run_adapters(recipe, config);
  const auto steps = total_steps(recipe, *data.train);
  build_schedule(recipe, steps);
  check_run_folder(recipe);
  const auto& stats = data.train->stats();
  const auto dropped = stats.describe_dropped(recipe.data.sequence_length);
  fmt::print("model       {} of {}, {} parameters\n", config.architecture, with_model_as_named(recipe).model.path,
             format_count(parameters));
  fmt::print("data        {} samples in {} rows of {} tokens, {} label tokens{}{}\n", stats.documents,
             data.train->rows(), recipe.data.sequence_length, stats.label_tokens, dropped.empty() ? "" : "; ", dropped);
  if (!adapters.empty()) fmt::print("adapters    {}\n", adapters);
  if (data.validation) fmt::print("validation  {} rows\n", data.validation->rows());
  fmt::print("layout      {} ranks: {}, {} micro-batches of {} a rank and step\n", world_size, describe_layout(layout),
             layout.micro_batches, recipe.train.local_batch_size);
  fmt::print("device      {}\n", describe_run_device(recipe, world_size));
  if (layout.pp > 1) fmt::print("pipeline    {}\n", describe_pipeline(recipe, layout, config));
  const int64_t batch = recipe.train.global_batch_size;
  const int64_t rows = total_rows(recipe, *data.train).value_or(steps * batch), last = rows - (steps - 1) * batch;
  fmt::print("run         {} steps{}, {:.2f} epochs, into {}\n", steps,
             last < batch ? fmt::format(", the last one of {} rows", last) : "",
             static_cast<double>(rows) / static_cast<double>(data.train->rows()), recipe.checkpoint.dir);
  for (const auto& note : recipe_notes(recipe, data.train->rows(), steps)) log_warning("{}", note);
}

}  // namespace tessera::train
