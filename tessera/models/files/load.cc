#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/text/quote.h"
#include "tessera/base/warn_once.h"
#include "tessera/formats/tensor_files/finite.h"
#include "tessera/formats/tensor_files/tensor_files.h"
#include "tessera/models/config/family.h"
#include "tessera/models/files/weights.h"
#include "tessera/models/gguf/gguf_weights.h"
#include "tessera/models/tensors/model_parameters.h"
#include "tessera/models/tensors/stacked_tensors.h"
#include "tessera/nn/linear/quantized_linear.h"

namespace tessera {
namespace {

constexpr size_t kShownProblems = 4;

bool is_weight_dtype(c10::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kDouble;
}

// Older files contain rotary_emb.inv_freq, which this library computes from the config and does not load.
bool is_computed(std::string_view name) { return name.ends_with("rotary_emb.inv_freq"); }

std::string shape_text(c10::IntArrayRef shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

// Collects all problems of a folder, to report them in one error: kShape when every problem is a wrong shape, else
// kFormat.
struct LoadProblems {
  std::vector<std::string> lines;
  bool only_shapes = true;
  void add(std::string line, bool is_shape = false) {
    lines.push_back(std::move(line));
    only_shapes = only_shapes && is_shape;
  }
  void raise_if_any(const std::filesystem::path& dir) const {
    if (lines.empty()) return;
    const std::vector<std::string> shown(
        lines.begin(), lines.begin() + static_cast<std::ptrdiff_t>(std::min(kShownProblems, lines.size())));
    const auto remaining = lines.size() > shown.size() ? fmt::format("; and {} more", lines.size() - shown.size()) : "";
    raise(only_shapes ? ErrorKind::kShape : ErrorKind::kFormat,
          "[models.load] {}: {}{}. List the folder with 'tessera ckpt ls PATH'.", dir.string(), fmt::join(shown, "; "),
          remaining);
  }
};

// The tensors of the folder from which a parameter is read: one tensor, or for stacked experts the tensors of all
// experts.
struct TensorSource {
  std::string name;
  std::vector<StackedTensor> stacked;
  std::vector<std::string> other_names{};  // further tensors of the folder for the same parameter (a tied head)
};

// Warns of tensors that the model does not have. transformers also leaves them unused and lists them.
void warn_of_unused(const std::vector<std::string>& names, const std::filesystem::path& dir) {
  if (names.empty()) return;
  const auto shown = std::min(kShownProblems, names.size());
  const auto further = names.size() > shown ? fmt::format(" and {} more", names.size() - shown) : "";
  log_warning_once("[models.load] {}: {} tensors do not belong to this model and stay unused: {}{}", dir.string(),
                   names.size(), fmt::join(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(shown), ", "),
                   further);
}

void check_stored(const std::string& name, const StoredTensor& entry, c10::IntArrayRef expected_shape,
                  LoadProblems& problems) {
  if (expected_shape != at::IntArrayRef(entry.shape)) {
    problems.add(fmt::format("{}: saved {}, model wants {}", name, shape_text(entry.shape), shape_text(expected_shape)),
                 true);
  }
  if (!is_weight_dtype(entry.dtype)) {
    problems.add(
        fmt::format("{}: dtype {} is not supported, wanted F32, BF16, F16 or F64", name, c10::toString(entry.dtype)));
  }
}

// Checks the tensors of stacked experts up to the first missing one. The others are not reported: with a config that
// claims more experts than the folder has, the list of problems would be too long.
bool has_stacked(const std::vector<StackedTensor>& stacked, int64_t columns, const TensorFiles& folder,
                 LoadProblems& problems) {
  for (const auto& each : stacked) {
    if (!folder.contains(each.name)) {
      problems.add(fmt::format("{} is missing", each.name));
      return false;
    }
    check_stored(each.name, folder.at(each.name), {each.rows, columns}, problems);
  }
  return true;
}

// Returns the per-expert tensors from which `parameter` is read if it is a stack of experts; else an empty list. Their
// names derive from the first of `names` for which the folder has a per-expert tensor, else from the first of `names`.
std::vector<StackedTensor> stack_of(const WeightMap& map, const std::vector<std::string>& names,
                                    const SharedParameter& parameter, const TensorFiles& folder) {
  for (const auto& name : names) {
    auto stack = stacked_tensors(map, name, parameter.tensor.sizes());
    if (!stack.empty() && folder.contains(stack.front().name)) return stack;
  }
  return stacked_tensors(map, names.front(), parameter.tensor.sizes());
}

// Returns the names in files of the parameters that a whole model of this config has and this model does not have
// (other pipeline stages).
std::set<std::string, std::less<>> names_in_other_stages(const ModelConfig& config, const WeightMap& map,
                                                         const std::vector<SharedParameter>& own,
                                                         const TensorFiles& folder) {
  std::set<std::string> held;
  for (const auto& parameter : own) held.insert(parameter.names.begin(), parameter.names.end());
  std::set<std::string, std::less<>> all;
  const auto model = make_model(config, {.device = c10::Device(at::kMeta)});
  for (const auto& parameter : shared_parameters(*model)) {
    const auto is_held = [&](const std::string& name) { return held.contains(name); };
    if (std::ranges::any_of(parameter.names, is_held)) {
      // A tied weight may have one name in this model and another name in another stage. For each name of the weight
      // that this model does not have, the names that files use for it (WeightMap::names_of) are added to `all`.
      for (const auto& name : parameter.names) {
        for (const auto& each : is_held(name) ? std::vector<std::string>() : map.names_of(name)) all.insert(each);
      }
      continue;
    }
    const auto names = file_names(map, parameter);
    all.insert(names.begin(), names.end());
    for (const auto& each : stack_of(map, names, parameter, folder)) {
      if (folder.contains(each.name)) all.insert(each.name);
    }
  }
  return all;
}

// Whether `name` is the name of an expert's tensor in a layer whose experts the model reads as a stack. If no parameter
// uses this tensor, it is an error: transformers would stack it with the other experts and find a wrong shape.
bool is_of_stack(std::string_view name, const std::vector<TensorSource>& sources) {
  constexpr std::string_view kExperts = ".experts.";
  const auto at = name.find(kExperts);
  if (at == std::string_view::npos) return false;
  const auto layer = name.substr(0, at + kExperts.size());
  return std::ranges::any_of(sources, [&](const TensorSource& source) {
    return !source.stacked.empty() && source.stacked.front().name.starts_with(layer);
  });
}

// Returns all names other than `name` under which the folder has the parameter too.
std::vector<std::string> other_names(const std::vector<std::string>& names, const std::string& name,
                                     const TensorFiles& folder) {
  std::vector<std::string> others;
  for (const auto& each : names) {
    const bool seen = each == name || std::ranges::find(others, each) != others.end();
    if (!seen && folder.contains(each)) others.push_back(each);
  }
  return others;
}

// Finds the tensors of the folder for every parameter and checks names, shapes and dtypes. A tensor of the folder is
// unused unless it belongs to a parameter of this stage or of another stage, or is_computed() or is_unowned() holds.
// All problems are thrown in one error before any value is read.
std::vector<TensorSource> match_tensors(const CausalLM& model, const std::vector<SharedParameter>& parameters,
                                        const TensorFiles& folder, UnusedTensors allowed) {
  const auto& map = family_of(model.config().architecture).weights;
  LoadProblems problems;
  std::vector<TensorSource> found;
  std::set<std::string, std::less<>> known;
  for (const auto& parameter : parameters) {
    const auto names = file_names(map, parameter);
    const auto name = std::ranges::find_if(names, [&](const auto& each) { return folder.contains(each); });
    auto stacked = stack_of(map, names, parameter, folder);
    const bool in_parts = name == names.end() && !stacked.empty() && folder.contains(stacked.front().name);
    if (!in_parts) {
      known.insert(names.begin(), names.end());
      if (name == names.end()) {
        problems.add(fmt::format("{} is missing", names.front()));
        continue;
      }
      found.push_back({*name, {}, other_names(names, *name, folder)});
      check_stored(*name, folder.at(*name), parameter.tensor.sizes(), problems);
      for (const auto& other : found.back().other_names) {
        check_stored(other, folder.at(other), parameter.tensor.sizes(), problems);
      }
      continue;
    }
    for (const auto& each : stacked) {
      if (folder.contains(each.name)) known.insert(each.name);
    }
    if (has_stacked(stacked, parameter.tensor.size(2), folder, problems)) {
      found.push_back({names.front(), std::move(stacked)});
    }
  }
  // names_in_other_stages(), computed when it is needed for the first time.
  std::optional<std::set<std::string, std::less<>>> elsewhere;
  const auto is_in_other_stage = [&](const std::string& name) {
    if (!elsewhere) elsewhere = names_in_other_stages(model.config(), map, parameters, folder);
    return elsewhere->contains(name);
  };
  std::vector<std::string> unused;
  for (const auto& [name, stored] : folder.tensors()) {
    if (known.contains(name) || is_computed(name) || map.is_unowned(name) || is_in_other_stage(name)) continue;
    if (allowed == UnusedTensors::kRefuse || is_of_stack(name, found)) {
      problems.add(fmt::format("{} is unexpected", escape(name)));
    } else {
      unused.push_back(name);
    }
  }
  // When tensors are missing, the error also lists the unused tensors: these may be the missing tensors under other
  // names.
  for (const auto& name : problems.lines.empty() ? std::vector<std::string>() : unused) {
    problems.add(fmt::format("{} is unexpected", escape(name)));
  }
  problems.raise_if_any(folder.path());
  warn_of_unused(unused, folder.path());
  return found;
}

// Checks that the values of a box of the tensor `name` are finite, in the file and after conversion to the model's
// dtype; Error kFormat if not. `read` holds the box, which begins at `offset` in the stored tensor, converted to the
// model's dtype. Only if a value in `read` is not finite, the stored values are read again for the error message.
void check_read(const TensorFiles& folder, const std::string& name, c10::IntArrayRef offset, const at::Tensor& read) {
  if (!find_non_finite(read)) return;
  const auto stored = at::empty(read.sizes(), at::TensorOptions(folder.at(name).dtype));
  folder.read(name, offset, stored);
  check_converted(stored, read, name, "[models.load] " + folder.path().string(), offset);
}

// Whether two tensors of the folder have equal values in this box after conversion to `dtype`. Reads a limited number
// of rows at a time to bound the memory.
bool are_equal(const TensorFiles& folder, const std::string& left, const std::string& right, const LocalBox& box,
               c10::ScalarType dtype) {
  constexpr int64_t kElements = int64_t{1} << 22;
  auto shape = box.shape;
  auto offset = box.offset;
  const int64_t rows = shape.empty() ? 1 : shape[0], row = rows == 0 ? 0 : c10::multiply_integers(shape) / rows;
  const int64_t step = std::max<int64_t>(1, kElements / std::max<int64_t>(1, row));
  for (int64_t begin = 0; begin < rows && row > 0; begin += step) {
    if (!shape.empty()) {
      shape[0] = std::min(step, rows - begin);
      offset[0] = box.offset[0] + begin;
    }
    const auto one = at::empty(shape, at::TensorOptions(dtype)), other = at::empty_like(one);
    folder.read(left, offset, one);
    folder.read(right, offset, other);
    check_read(folder, left, offset, one);  // a NaN is never equal; report it as the error instead
    check_read(folder, right, offset, other);
    if (!at::equal(one, other)) return false;
  }
  return true;
}

// If the folder has a parameter under two names, such as a tied head and the embedding, checks that the two tensors
// have equal values. Different values are an error here, because a model is tied before its weights are read.
// transformers instead unties the head, whatever tie_word_embeddings is.
void check_tied(const std::vector<SharedParameter>& parameters, const std::vector<TensorSource>& sources,
                const TensorFiles& folder) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const bool tied = parameters[i].names.size() > 1;
    for (const auto& other : sources[i].other_names) {
      TESSERA_CHECK(are_equal(folder, sources[i].name, other, local_shard_box(parameters[i].tensor),
                              parameters[i].tensor.scalar_type()),
                    ErrorKind::kFormat, "[models.load] {}: {} and {} are one parameter{}, but their values differ. {}.",
                    folder.path().string(), sources[i].name, other,
                    tied ? " (tie_word_embeddings in config.json)" : " under two names",
                    tied ? "Set tie_word_embeddings to false to use both, as transformers does, or remove the wrong one"
                         : "Remove the wrong one");
    }
  }
}

// Reads this rank's shard of a parameter (`box`) from the tensors of `source` into `local`. Returns the number of bytes
// that the read elements have in the folder.
int64_t read_local_part(const TensorFiles& folder, const TensorSource& source, const LocalBox& box,
                        const at::Tensor& local) {
  const auto read = [&](const std::string& name, c10::IntArrayRef offset, const at::Tensor& into) {
    folder.read(name, offset, into);
    check_read(folder, name, offset, into);
    return into.numel() * static_cast<int64_t>(c10::elementSize(folder.at(name).dtype));
  };
  if (source.stacked.empty()) return read(source.name, box.offset, local);
  int64_t bytes = 0;
  for (const auto& each : source.stacked) {
    // Dim 0 of `box` is the expert and dim 1 is the row of the expert. [begin, end) are the expert's rows that are both
    // in this per-expert tensor and in `box`.
    const int64_t expert = each.expert - box.offset[0];
    const int64_t begin = std::max(each.first_row, box.offset[1]);
    const int64_t end = std::min(each.first_row + each.rows, box.offset[1] + box.shape[1]);
    if (expert < 0 || expert >= box.shape[0] || begin >= end) continue;
    const auto into = local[expert].narrow(0, begin - box.offset[1], end - begin);
    bytes += read(each.name, {begin - each.first_row, box.offset[2]}, into);
  }
  return bytes;
}

std::shared_ptr<const TensorFiles> open_weights(const std::filesystem::path& path, FolderAdapter adapter) {
  if (adapter == FolderAdapter::kRefuse) refuse_folder_adapter(path);
  return TensorFiles::open(path, {.weights_only = true});
}

}  // namespace

void refuse_folder_adapter(const std::filesystem::path& dir) {
  TESSERA_CHECK(
      !std::filesystem::exists(dir / "adapter_config.json") || !std::filesystem::exists(dir / "config.json"),
      ErrorKind::kConfig,
      "[models.load] {}: holds a model and, in adapter_config.json, an adapter of it. Merge them with "
      "'tessera ckpt convert {} OUT --to hf --adapter {}', or move adapter_config.json away to use the model alone.",
      dir.string(), dir.string(), dir.string());
}

void check_pretrained(CausalLM& model, const std::filesystem::path& dir, UnusedTensors unused) {
  if (const auto file = gguf_of(dir); !file.empty()) return check_gguf(model, file);
  const auto folder = open_weights(dir, FolderAdapter::kRefuse);
  const auto parameters = parameters_and_packed(model);
  check_tied(parameters, match_tensors(model, parameters, *folder, unused), *folder);
}

std::string check_folder(const std::filesystem::path& dir) {
  if (!std::filesystem::is_regular_file(dir / "config.json")) return "it holds no config.json";
  if (const auto unknown = unknown_architecture(dir)) {
    return fmt::format("this version has no model of the architecture {} in its config.json", quote(*unknown, 60));
  }
  const auto config = ModelConfig::from_folder(dir);
  check_pretrained(*make_model(config, {.dtype = config.dtype.value_or(at::kFloat), .device = at::kMeta}), dir);
  return "";
}

void load_pretrained(CausalLM& model, const std::filesystem::path& dir, c10::Device device, FolderAdapter adapter) {
  at::NoGradGuard no_grad;
  if (const auto file = gguf_of(dir); !file.empty()) return load_gguf(model, file, device);
  const auto folder = open_weights(dir, adapter);
  auto parameters = shared_parameters(model);
  const auto sources = match_tensors(model, parameters_and_packed(model), *folder, UnusedTensors::kWarn);
  check_tied(parameters, sources, *folder);
  int64_t bytes = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto box = local_shard_box(parameters[i].tensor);
    const auto local = writable_local_shard(parameters[i], device);
    if (local.numel() == 0) continue;
    bytes += read_local_part(*folder, sources[i], box, local);
  }
  auto source = sources.begin() + static_cast<std::ptrdiff_t>(parameters.size());
  for (const auto& [name, packed] : nn::packed_weights(model)) {
    // Only one packed weight is in memory as float32 at a time.
    const auto values = at::empty({packed->out, packed->in}, at::kFloat);
    bytes += read_local_part(*folder, *source++, {values.sizes().vec(), {0, 0}}, values);
    packed->pack(values);
  }
  log_info("[models.load] {}: {} parameters, {:.1f} MiB read", dir.string(), parameters.size(),
           static_cast<double>(bytes) / (1 << 20));
}

std::shared_ptr<CausalLM> from_pretrained(const std::filesystem::path& dir, std::optional<c10::ScalarType> dtype,
                                          c10::Device device, FolderAdapter adapter) {
  const auto config = ModelConfig::from_folder(dir);
  auto model = make_model(config, {.dtype = dtype.value_or(config.dtype.value_or(at::kFloat)), .device = at::kMeta});
  load_pretrained(*model, dir, device, adapter);
  return model;
}

}  // namespace tessera
