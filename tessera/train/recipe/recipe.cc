#include "tessera/train/recipe/recipe.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <map>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/text/nearest.h"
#include "tessera/base/text/quote.h"
#include "tessera/train/recipe/data_sources.h"
#include "tessera/train/recipe/parameter_groups.h"
#include "tessera/train/recipe/recipe_schedule.h"
#include "tessera/train/recipe/recipe_schema.h"
#include "tessera/train/recipe/recipe_value.h"
#include "tessera/train/recipe/yaml_tree.h"

namespace tessera::train {
namespace {

std::string_view last_part(std::string_view path) { return path.substr(path.rfind('.') + 1); }

// The key that a user probably meant by the unknown `path`. The rules, in this order:
// 1. section and name of `path` together resemble the name of a key (validation.every: train.validate_every), where
//    fewer than a fifth of the characters differ;
// 2. a key or alias of another section has the same last part (only for a `path` of more than 4 characters);
// 3. the nearest key of the same section by edit distance, or of all sections where the section is unknown, too.
std::string_view nearest_key(std::string_view path) {
  static const std::vector<std::string> kPaths = [] {
    std::vector<std::string> paths;
    for (const auto& key : recipe_keys()) paths.push_back(key.path());
    for (const auto& key : recipe_keys()) paths.insert(paths.end(), key.aliases.begin(), key.aliases.end());
    return paths;
  }();
  std::string joined(path);
  std::replace(joined.begin(), joined.end(), '.', '_');
  for (size_t i = 0; i < recipe_keys().size(); ++i) {  // the keys come first in kPaths; aliases are left out here
    if (5 * edit_distance(joined, last_part(kPaths[i])) < joined.size()) return kPaths[i];
  }
  for (const auto& known : kPaths) {
    if (last_part(known) == last_part(path) && path.size() > 4) return known;
  }
  const std::vector<std::string_view> all(kPaths.begin(), kPaths.end());
  const std::string_view section = path.substr(0, path.find('.') + 1);
  std::vector<std::string_view> inside;
  for (const auto known : all) {
    if (!section.empty() && known.substr(0, section.size()) == section) inside.push_back(known);
  }
  return nearest(path, inside.empty() ? all : inside);
}

// Collects settings from a file and from overrides, in this order, and remembers where each key was set. That place
// begins every error message, and tells which of two settings of one key is a repetition in the file (an error) and
// which is an override.
class RecipeReader {
 public:
  explicit RecipeReader(std::string source) : source_(std::move(source)) {}

  void read(const YamlNode& root) {
    if (root.kind == YamlNode::Kind::kNull) return;
    TESSERA_CHECK(root.kind == YamlNode::Kind::kMapping, ErrorKind::kConfig,
                  "[train.recipe] {}:{}: found no sections, wanted 'model:', 'data:', ... See 'tessera train --help'.",
                  source_, root.line);
    read_mapping(root, "");
  }

  // Applies an override "section.key=value". The value is parsed as YAML. If the key's field is text and the value does
  // not begin with a quote, the value is used unchanged.
  void override_with(const std::string& text) {
    const size_t equals = text.find('=');
    TESSERA_CHECK(equals != text.npos && equals > 0, ErrorKind::kConfig,
                  "[train.recipe] override {}: wanted section.key=value, as in train.steps=20.", quote(text));
    const std::string path = text.substr(0, equals);
    const std::string where = "override " + quote(text);
    const RecipeKey* key = find_recipe_key(path);
    if (!key) raise_unknown(where, path);
    setting_origins_.erase(key);  // an override may replace the value of the file or of an earlier override
    set(*key, override_value(*key, text.substr(equals + 1), where), path, where);
    overridden_.push_back(key);
  }

  Recipe finish() {
    const auto stem = std::filesystem::path(source_).stem().string();
    recipe_.name = stem.empty() ? "recipe" : stem;
    auto& dir = recipe_.checkpoint.dir;
    constexpr std::string_view kPlaceholder = "RECIPE-NAME";
    if (const size_t at = dir.find(kPlaceholder); at != dir.npos) dir.replace(at, kPlaceholder.size(), recipe_.name);
    expand_home("model.path", recipe_.model.path);
    expand_home("model.weights", recipe_.model.weights);
    expand_home("model.lora.path", recipe_.lora.path);
    expand_home_of_sources("data.train", recipe_.data.train);
    expand_home_of_sources("data.validation", recipe_.data.validation);
    expand_home("data.cache", recipe_.data.cache);
    parse_columns(recipe_.data.columns);
    expand_home("checkpoint.dir", dir);
    expand_home("checkpoint.resume", recipe_.checkpoint.resume);
    // Checks of several keys together come last, when every value is final.
    for (const auto& key : recipe_keys()) check_required(key);
    check_duration();
    check_batch();
    check_rounding();
    check_early_step();
    check_dependent_keys();
    return std::move(recipe_);
  }
  // The recipe with only the type and the range of each value checked; names and paths are not expanded.
  Recipe take_unchecked() { return std::move(recipe_); }

 private:
  // Sets the keys of a mapping whose path from the root is `prefix`. A mapping is read recursively only if its path is
  // not itself a key: the value of data.columns, for one, is a mapping. parse_yaml() limits the depth.
  void read_mapping(const YamlNode& mapping, const std::string& prefix) {
    for (const auto& [name, node] : mapping.entries) {
      const std::string path = prefix.empty() ? name : prefix + "." + name;
      const std::string at = fmt::format("{}:{}", source_, node.line);
      if (const RecipeKey* key = find_recipe_key(path)) {
        set(*key, node, path, at);
      } else if (node.kind == YamlNode::Kind::kMapping && !node.entries.empty()) {
        read_mapping(node, path);
      } else if (is_section(path)) {
        TESSERA_CHECK(node.kind != YamlNode::Kind::kScalar && node.kind != YamlNode::Kind::kSequence,
                      ErrorKind::kConfig,
                      "[train.recipe] {}: section '{}': found no keys, wanted '{}: {{KEY: VALUE}}'.", at, path, path);
      } else {
        raise_unknown(at, path);
      }
    }
  }

  static bool is_section(std::string_view name) {
    const std::string below = std::string(name) + ".";
    return std::any_of(recipe_keys().begin(), recipe_keys().end(),
                       [&](const auto& key) { return key.path().starts_with(below); });
  }

  [[noreturn]] static void raise_unknown(const std::string& at, const std::string& path) {
    std::string_view closest = nearest_key(path);
    if (path.find('.') == path.npos) {  // a path without a dot may be a misspelt section
      for (const auto& section : recipe_sections()) {
        if (edit_distance(path, section.name) < edit_distance(path, closest) &&
            edit_distance(path, section.name) <= 2) {
          closest = section.name;
        }
      }
    }
    raise(ErrorKind::kConfig, "[train.recipe] {}: unknown key {}. Did you mean '{}'? 'tessera train --help' lists all.",
          at, quote(path), closest);
  }

  static YamlNode override_value(const RecipeKey& key, const std::string& text, const std::string& where) {
    Recipe defaults;
    const bool is_text = std::holds_alternative<std::string*>(key.field(defaults));
    const bool quoted = !text.empty() && (text.front() == '"' || text.front() == '\'');
    if (is_text && !quoted) {  // a path or name may hold characters of YAML; on the command line it needs no quotes
      return {.kind = YamlNode::Kind::kScalar, .text = text};
    }
    return parse_yaml(text, where);
  }

  void set(const RecipeKey& key, const YamlNode& node, const std::string& spelled, const std::string& at) {
    // A key and its alias are the same entry of setting_origins_, so a file that has both is refused.
    const auto [before, first] = setting_origins_.emplace(&key, SettingOrigin{spelled, at});
    TESSERA_CHECK(first, ErrorKind::kConfig, "[train.recipe] {}: '{}' is set twice, as '{}' at {}. Keep one.", at,
                  spelled, before->second.spelled, before->second.where);
    assign_value(key, node, at, recipe_);
  }

  // Checks a setting of the recipe: raises Error kConfig unless `good`. The message begins with where(key), the place
  // where `key` was set.
  template <class... Args>
  void check(bool good, const std::string& key, fmt::format_string<Args...> message, Args&&... args) const {
    if (good) return;
    raise(ErrorKind::kConfig, "[train.recipe] {}: {}: {}", where(key), key,
          fmt::format(message, std::forward<Args>(args)...));
  }

  // "FILE:LINE" or "override ..." that set a key, or the source of the recipe if the key has its default.
  std::string where(const std::string& path) const {
    const auto found = setting_origins_.find(find_recipe_key(path));
    return found == setting_origins_.end() ? source_ : found->second.where;
  }
  bool is_set(const char* path) const { return setting_origins_.count(find_recipe_key(path)) > 0; }

  // Expands ~ and ~/x as a shell does. The path of a folder whose name begins with ~ is written ./~x.
  void expand_home(const char* key, std::string& path) const {
    if (!path.starts_with('~')) return;
    const char* home = std::getenv("HOME");
    check(path == "~" || path.starts_with("~/"), key,
          "found {}, wanted a path without another user's ~. Write the folder out.", quote(path));
    check(home && *home == '/', key, "found {}, but HOME is not set to a folder. Write the folder out.", quote(path));
    path = home + path.substr(1);
  }

  // Sources are paths, or mappings that hold a path.
  void expand_home_of_sources(const char* key, std::vector<std::string>& sources) const {
    for (auto& item : sources) {
      std::string path = parse_source(item).path;
      expand_home(key, path);
      item = with_path(item, path);
    }
  }

  void check_required(const RecipeKey& key) {
    if (!key.required) return;
    const FieldRef field = key.field(recipe_);
    const auto* text = std::get_if<std::string*>(&field);
    const auto* list = std::get_if<std::vector<std::string>*>(&field);
    const bool missing = (text && (*text)->empty()) || (list && (*list)->empty());
    TESSERA_CHECK(!missing, ErrorKind::kConfig, "[train.recipe] {}: {} is missing: {}.", where(key.path()), key.path(),
                  key.help);
  }

  // Makes exactly one of train.steps and train.epochs set, and checks the warm-up. train.steps has a default, so
  // train.epochs alone unsets it. If both are set, the later override wins; both in the file are an error.
  void check_duration() {
    auto& train = recipe_.train;
    if (train.epochs) {
      // Position of the last override of a key, from 1; 0 for a key that was not overridden.
      const auto* steps_key = find_recipe_key("train.steps");
      const auto* epochs_key = find_recipe_key("train.epochs");
      const auto last = [&](const RecipeKey* key) {
        return std::find(overridden_.rbegin(), overridden_.rend(), key).base() - overridden_.begin();
      };
      if (is_set("train.steps") && train.steps && last(steps_key) > last(epochs_key)) {
        train.epochs.reset();
      } else if (!is_set("train.steps") || last(epochs_key) > last(steps_key)) {
        train.steps.reset();
      }
    }
    TESSERA_CHECK(!(train.steps && train.epochs), ErrorKind::kConfig,
                  "[train.recipe] {}: train.epochs: found {} with train.steps {}, wanted one of the two.",
                  where("train.epochs"), *train.epochs, *train.steps);
    TESSERA_CHECK(train.steps || train.epochs, ErrorKind::kConfig,
                  "[train.recipe] {}: train.steps and train.epochs: found null, wanted one of them.",
                  where("train.steps"));
    // The default warm-up adapts to a short run; a warm-up that the user set must fit.
    auto& warmup = recipe_.schedule.warmup_steps;
    if (train.steps && !is_set("schedule.warmup_steps")) {
      warmup = std::min(warmup, longest_warmup(recipe_.schedule, *train.steps));
    }
    check(!train.steps || warmup <= *train.steps, "schedule.warmup_steps", "found {}, wanted at most train.steps, {}.",
          warmup, train.steps.value_or(0));
  }

  void check_batch() {
    const auto& parallel = recipe_.parallel;
    TESSERA_CHECK(!(parallel.dp_replicate == -1 && parallel.dp_shard == -1), ErrorKind::kConfig,
                  "[train.recipe] {}: parallel.dp_replicate and dp_shard: found -1 twice, wanted at most one -1.",
                  where("parallel.dp_replicate"));
    const auto& train = recipe_.train;
    check(train.global_batch_size % train.local_batch_size == 0, "train.global_batch_size",
          "found {}, wanted a multiple of train.local_batch_size, {}.", train.global_batch_size,
          train.local_batch_size);
  }

  void check_rounding() const {
    const auto& optimizer = recipe_.optimizer;
    check(!optimizer.stochastic_rounding || (!optimizer.master_weights && recipe_.model.dtype == "bfloat16"),
          "optimizer.stochastic_rounding",
          "found true with optimizer.master_weights {} and model.dtype {}, wanted false and bfloat16.",
          optimizer.master_weights, recipe_.model.dtype);
  }

  void check_early_step() const {
    const auto& optimizer = recipe_.optimizer;
    if (!optimizer.early_step_in_backward) return;
    const auto check_combination = [&](bool good, const std::string& found) {
      check(good, "optimizer.early_step_in_backward",
            "found true with {}: parameters are updated before all gradients are computed.", found);
    };
    check_combination(optimizer.max_grad_norm == 0,
                      fmt::format("optimizer.max_grad_norm {}, wanted 0", optimizer.max_grad_norm));
    check_combination(optimizer.name == "adamw" || optimizer.name == "sgd",
                      fmt::format("optimizer.name {}, wanted adamw or sgd", optimizer.name));
    check_combination(recipe_.train.on_nonfinite == "stop",
                      fmt::format("train.on_nonfinite {}, wanted stop", recipe_.train.on_nonfinite));
  }

  // Checks that all keys that begin with `prefix` have their defaults, for keys that have no effect in this recipe.
  void check_unset(const std::string& prefix, const std::string& reason) const {
    const Recipe defaults;
    for (const auto& key : recipe_keys()) {
      const auto path = key.path();
      if (!path.starts_with(prefix)) continue;
      const auto value = format_value(key, recipe_);
      check(value == format_value(key, defaults), path, "found {} {}.", value, reason);
    }
  }

  void check_dependent_keys() const {
    if (!recipe_.lora.is_enabled()) {
      check_unset("model.lora.", "without adapters, wanted model.lora.rank above 0 or a model.lora.path");
    }
    check(!recipe_.lora.double_quant || recipe_.lora.quantize == "nf4", "model.lora.double_quant",
          "found true with model.lora.quantize {}, wanted nf4.", recipe_.lora.quantize);
    if (const auto& name = recipe_.schedule.name; name != "wsd") {
      check_unset("schedule.decay_", fmt::format("with schedule.name {}, wanted wsd", name));
    }
    const auto& train = recipe_.train;
    check(train.page == 0 || recipe_.log.jsonl, "train.page",
          "the page shows the metrics of log.jsonl, which is false. Set log.jsonl to true.");
    check(train.early_stopping_patience == 0 || (train.validate_every > 0 && !recipe_.data.validation.empty()),
          "train.early_stopping.patience",
          "found {} without validations, wanted data.validation and train.validate_every above 0.",
          train.early_stopping_patience);
    for (const auto& text : recipe_.optimizer.groups) parse_group_setting(text);
    if (train.steps) build_schedule(recipe_, *train.steps);
  }

  struct SettingOrigin {
    std::string spelled;
    std::string where;
  };
  std::string source_;
  Recipe recipe_;
  std::map<const RecipeKey*, SettingOrigin> setting_origins_;  // keys that were set, by their path or alias
  std::vector<const RecipeKey*> overridden_;                   // in the order of the command line
};

std::string read_text(const std::filesystem::path& file) {
  std::error_code error;
  const auto status = std::filesystem::status(file, error);
  TESSERA_CHECK(std::filesystem::exists(status), ErrorKind::kConfig,
                "[train.recipe] {}: no such file. Give the path of a recipe; recipes/ holds some.",
                quote(file.string()));
  TESSERA_CHECK(!std::filesystem::is_directory(status), ErrorKind::kConfig,
                "[train.recipe] {}: found a folder, wanted a YAML file.", quote(file.string()));
  try {
    return read_file(file, kYamlLimitBytes);
  } catch (const Error& reason) {
    raise(ErrorKind::kConfig, "[train.recipe] {}: {}", quote(file.string()), reason.what());
  }
}

}  // namespace

Recipe read_recipe(const std::filesystem::path& file, std::span<const std::string> overrides) {
  return parse_recipe(read_text(file), file.string(), overrides);
}

Recipe parse_recipe(std::string_view yaml, const std::string& source, std::span<const std::string> overrides) {
  RecipeReader reader(source);
  reader.read(parse_yaml(yaml, source));
  for (const auto& text : overrides) reader.override_with(text);
  return reader.finish();
}

Recipe parse_layout_settings(std::span<const std::string> settings, const std::string& verb) {
  RecipeReader reader(verb);
  for (const auto& text : settings) {
    TESSERA_CHECK(text.starts_with("parallel.") || text.starts_with("comm."), ErrorKind::kConfig,
                  "[{}] setting {}: wanted parallel.KEY=VALUE or comm.KEY=VALUE, as in parallel.tp=2.", verb,
                  quote(text));
    reader.override_with(text);
  }
  return reader.take_unchecked();
}

bool fit_to_ranks(std::initializer_list<int64_t*> dims, int64_t ranks) {
  int64_t known = 1;            // product of the dims that are not -1
  int64_t* open_dim = nullptr;  // the dim that is -1
  for (int64_t* dim : dims) {
    if (*dim == -1) {
      if (open_dim) return false;
      open_dim = dim;
    } else {
      if (*dim < 1 || *dim > ranks / known) return false;  // known <= ranks always holds: no overflow
      known *= *dim;
    }
  }
  if (ranks % known != 0 || (!open_dim && known != ranks)) return false;
  if (open_dim) *open_dim = ranks / known;
  return true;
}

RunLayout fit_layout(const ParallelSection& dims, int64_t world_size, const std::string& where) {
  RunLayout layout{.dp_replicate = dims.dp_replicate,
                   .dp_shard = dims.dp_shard,
                   .tp = dims.tp,
                   .cp = dims.cp,
                   .pp = dims.pp,
                   .ep = dims.ep};
  const auto sizes = {&layout.dp_replicate, &layout.dp_shard, &layout.tp, &layout.cp, &layout.pp};
  const auto open_dims = std::ranges::count_if(sizes, [](const int64_t* size) { return *size == -1; });
  TESSERA_CHECK(open_dims <= 1, ErrorKind::kConfig, "[{}] parallel: found -1 twice, wanted at most one -1.", where);
  const bool fits = fit_to_ranks(sizes, world_size);
  TESSERA_CHECK(
      fits, ErrorKind::kConfig,
      "[{}] parallel: dp_replicate {} x dp_shard {} x tp {} x cp {} x pp {} does not fit a world of {} ranks, "
      "wanted sizes that multiply to the {} ranks. Change a dim, set one to -1, or change --nproc.",
      where, dims.dp_replicate, dims.dp_shard, dims.tp, dims.cp, dims.pp, world_size, world_size);
  layout.data_parallel = layout.dp_replicate * layout.dp_shard;
  const int64_t stage_ranks = layout.ranks_of_stage();
  TESSERA_CHECK(
      stage_ranks % layout.ep == 0, ErrorKind::kConfig,
      "[{}] parallel.ep: found {}, wanted a divisor of {}, the ranks of dp_replicate {} x dp_shard {} x cp {} "
      "x tp {} that experts are divided over.",
      where, layout.ep, stage_ranks, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp);
  return layout;
}

RunLayout resolve_layout(const Recipe& recipe, int64_t world_size) {
  auto layout = fit_layout(recipe.parallel, world_size, "train.recipe");
  const int64_t sequences = layout.data_parallel * recipe.train.local_batch_size;
  TESSERA_CHECK(recipe.train.global_batch_size % sequences == 0, ErrorKind::kConfig,
                "[train.recipe] train.global_batch_size: found {}, wanted a multiple of {}: {} data-parallel ranks x "
                "local_batch_size {}.",
                recipe.train.global_batch_size, sequences, layout.data_parallel, recipe.train.local_batch_size);
  layout.micro_batches = recipe.train.global_batch_size / sequences;
  return layout;
}

}  // namespace tessera::train
