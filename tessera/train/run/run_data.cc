// Loads the data of a run: one rank of each host tokenizes and writes the cache, then the other ranks read it.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/data/rows/cache.h"
#include "tessera/models/config/end_tokens.h"
#include "tessera/train/output/run_mark.h"
#include "tessera/train/recipe/data_sources.h"
#include "tessera/train/run/run_setup.h"

namespace tessera::train {
namespace {

// A hash of all files that token ids depend on: tokenizer and chat template of a model folder, or the GGUF file. It is
// part of the key of the data cache.
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
                                                  const std::filesystem::path& cache, bool quiet,
                                                  const std::atomic<bool>* stop) {
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
                            .end_tokens = run.end_tokens,
                            .cache_folder = cache,
                            .quiet = quiet,
                            .stop = stop};
  for (const auto& item : training ? section.train : section.validation) options.sources.push_back(parse_source(item));
  options.tokenizer_identity = tokenizer_identity(recipe.model.path, data::DataCache(cache));
  return data::Dataset::load(options, *run.tokenizer, run.chat_template);
}

// Like comm::attempt_together(), for an action that may take longer than the time-out of a collective. The action runs
// on a thread of its own. Meanwhile the ranks exchange short messages, each long before its time-out, until all ranks
// are done. If the exchange throws because a rank died, `stop` asks the action to end, so that this rank ends soon,
// too. COLLECTIVE over the group.
void attempt_long_on_all_ranks(comm::Group& group, const std::function<void(const std::atomic<bool>& stop)>& action) {
  std::atomic<bool> stop{false};
  if (group.size() == 1) return action(stop);
  auto outcome = std::async(std::launch::async, [&] { action(stop); });
  auto pause = std::chrono::milliseconds(20);
  try {
    for (bool all_done = false; !all_done;) {
      const bool done = outcome.wait_for(pause) == std::future_status::ready;
      const auto done_flags = comm::all_gather_bytes(group, done ? "done" : "");
      all_done = std::ranges::none_of(done_flags, [](const auto& text) { return text.empty(); });
      pause = std::min(pause * 2, std::chrono::milliseconds(500));
    }
  } catch (...) {
    stop = true;  // the destructor of `outcome` waits for the thread of the action
    throw;
  }
  comm::attempt_together(group, [&] { outcome.get(); });
}

}  // namespace

namespace {

RunData load_run_data(const Recipe& recipe, bool quiet, const std::atomic<bool>* stop) {
  RunData run;
  run.tokenizer = std::make_shared<const text::Tokenizer>(text::Tokenizer::from_folder(recipe.model.path));
  const auto config = ModelConfig::from_folder(recipe.model.path);
  run.vocab_size = config.vocab_size;
  const auto ends = listed_end_tokens(recipe.model.path, config);
  run.end_tokens.assign(ends.begin(), ends.end());
  run.chat_template = text::ChatTemplate::from_folder(recipe.model.path);
  const auto cache = data::DataCache::folder_of(recipe.data.cache);
  run.train = load_dataset(recipe, run, true, cache, quiet, stop);
  if (!recipe.data.validation.empty()) run.validation = load_dataset(recipe, run, false, cache, quiet, stop);
  return run;
}

}  // namespace

RunData load_run_data(const Recipe& recipe, bool quiet) { return load_run_data(recipe, quiet, nullptr); }

RunData load_run_data_on_all_ranks(const Recipe& recipe, const comm::World& world, comm::Group& world_group) {
  RunData run;
  const bool first = world.info().local_rank == 0, quiet = world.info().rank != 0;
  attempt_long_on_all_ranks(world_group, [&](const auto& stop) {
    if (first) run = load_run_data(recipe, quiet, &stop);
  });
  attempt_long_on_all_ranks(world_group,
                            [&](const auto& stop) {  // reads the cache; with data.cache off, tokenizes as well
                              if (!first) run = load_run_data(recipe, quiet, &stop);
                            });
  return run;
}

}  // namespace tessera::train
