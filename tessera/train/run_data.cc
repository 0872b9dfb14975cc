// The data of a run: tokenized by one rank of each host, read by all.
#include <algorithm>
#include <chrono>
#include <future>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/data/cache.h"
#include "tessera/train/data_sources.h"
#include "tessera/train/run_mark.h"
#include "tessera/train/run_setup.h"

namespace tessera::train {
namespace {

// What the ids of a text depend on: the files that tokenizer and template are read from, or the one that holds them.
std::string tokenizer_identity(const std::filesystem::path& model, const data::DataCache& cache) {
  if (!std::filesystem::is_directory(model)) return fingerprint_of(std::filesystem::canonical(model));
  std::string identity;
  for (const char* name :
       {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"}) {
    std::error_code ignored;
    if (std::filesystem::is_regular_file(model / name, ignored)) identity += cache.content_hash(model / name);
    identity += ";";
  }
  return identity;
}

std::shared_ptr<const data::Dataset> load_dataset(const Recipe& recipe, const RunData& run, bool training,
                                                  const std::filesystem::path& cache, bool quiet) {
  const auto& section = recipe.data;
  data::DataOptions options{.sources = {},
                            .purpose = training ? "train" : "validation",
                            .format = section.format,
                            .columns = parse_columns(section.columns),
                            .sequence_length = section.sequence_length,
                            .packing = section.packing,
                            .overlong = section.overlong,
                            .train_on_inputs = section.train_on_inputs,
                            .seed = static_cast<uint64_t>(recipe.train.seed),
                            .shuffle = training,
                            .vocab_size = run.vocab_size,
                            .cache_folder = cache,
                            .quiet = quiet};
  for (const auto& item : training ? section.train : section.validation) options.sources.push_back(parse_source(item));
  options.tokenizer_identity = tokenizer_identity(recipe.model.path, data::DataCache(cache));
  return data::Dataset::load(options, *run.tokenizer, run.chat_template);
}

// As comm::attempt_together, for an action that may take longer than a collective may wait: ranks ask one another while
// it lasts. COLLECTIVE over the group.
void attempt_long_together(comm::Group& group, const std::function<void()>& action) {
  if (group.size() == 1) return action();
  auto outcome = std::async(std::launch::async, action);
  auto pause = std::chrono::milliseconds(20);
  for (bool all_done = false; !all_done;) {
    const bool done = outcome.wait_for(pause) == std::future_status::ready;
    const auto told = comm::all_gather_bytes(group, done ? "done" : "");
    all_done = std::none_of(told.begin(), told.end(), [](const auto& text) { return text.empty(); });
    pause = std::min(pause * 2, std::chrono::milliseconds(500));
  }
  comm::attempt_together(group, [&] { outcome.get(); });
}

}  // namespace

RunData load_run_data(const Recipe& recipe, bool quiet) {
  RunData run;
  run.tokenizer = std::make_shared<const text::Tokenizer>(text::Tokenizer::from_folder(recipe.model.path));
  run.vocab_size = ModelConfig::from_folder(recipe.model.path).vocab_size;
  run.chat_template = text::ChatTemplate::from_folder(recipe.model.path);
  const auto cache = data::DataCache::folder_of(recipe.data.cache);
  run.train = load_dataset(recipe, run, true, cache, quiet);
  if (!recipe.data.validation.empty()) run.validation = load_dataset(recipe, run, false, cache, quiet);
  return run;
}

RunData load_run_data_together(const Recipe& recipe, const comm::World& world, comm::Group& everyone) {
  RunData run;
  const bool first = world.info().local_rank == 0, quiet = world.info().rank != 0;
  attempt_long_together(everyone, [&] {
    if (first) run = load_run_data(recipe, quiet);
  });
  attempt_long_together(everyone, [&] {  // found tokenized, unless nothing is kept
    if (!first) run = load_run_data(recipe, quiet);
  });
  return run;
}

}  // namespace tessera::train
