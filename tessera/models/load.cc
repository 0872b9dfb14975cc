#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/formats/tensor_files.h"
#include "tessera/models/detail/local_part.h"
#include "tessera/models/family.h"
#include "tessera/models/weights.h"

namespace tessera {
namespace {

constexpr size_t kShownProblems = 4;

bool is_weight_dtype(c10::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kDouble;
}

// Tensors that older files hold although they are computed.
bool is_computed(std::string_view name) { return name.ends_with("rotary_emb.inv_freq"); }

std::string shape_text(c10::IntArrayRef shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

struct Problems {
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
    const auto rest = lines.size() > shown.size() ? fmt::format("; and {} more", lines.size() - shown.size()) : "";
    raise(only_shapes ? ErrorKind::kShape : ErrorKind::kFormat,
          "[models.load] {}: {}{}. List the folder with 'tessera ckpt ls PATH'.", dir.string(), fmt::join(shown, "; "),
          rest);
  }
};

// The name under which the folder holds each parameter.
std::vector<std::string> match_names(const CausalLM& model, const std::vector<detail::SharedParameter>& parameters,
                                     const TensorFiles& folder) {
  const auto& map = family_of(model.config().architecture).weights;
  Problems problems;
  std::vector<std::string> found;
  std::set<std::string, std::less<>> known;
  for (const auto& parameter : parameters) {
    const auto names = detail::file_names(map, parameter);
    known.insert(names.begin(), names.end());
    const auto name = std::find_if(names.begin(), names.end(), [&](const auto& each) { return folder.contains(each); });
    if (name == names.end()) {
      problems.add(fmt::format("{} is missing", names.front()));
      continue;
    }
    found.push_back(*name);
    const auto& entry = folder.at(*name);
    if (parameter.tensor.sizes() != at::IntArrayRef(entry.shape)) {
      problems.add(fmt::format("{}: saved {}, model wants {}", *name, shape_text(entry.shape),
                               shape_text(parameter.tensor.sizes())),
                   true);
    }
    if (!is_weight_dtype(entry.dtype)) {
      problems.add(fmt::format("{}: dtype {} is not supported, wanted F32, BF16, F16 or F64", *name,
                               c10::toString(entry.dtype)));
    }
  }
  for (const auto& [name, stored] : folder.tensors()) {
    if (known.contains(name) || is_computed(name) || map.is_foreign(name)) continue;
    problems.add(fmt::format("{} is unexpected", name));
  }
  problems.raise_if_any(folder.path());
  return found;
}

std::shared_ptr<const TensorFiles> open_weights(const std::filesystem::path& path) {
  return TensorFiles::open(path, {.weights_only = true});
}

}  // namespace

void check_pretrained(CausalLM& model, const std::filesystem::path& dir) {
  match_names(model, detail::shared_parameters(model), *open_weights(dir));
}

void load_pretrained(CausalLM& model, const std::filesystem::path& dir, c10::Device device) {
  at::NoGradGuard no_grad;
  const auto folder = open_weights(dir);
  auto parameters = detail::shared_parameters(model);
  const auto names = match_names(model, parameters, *folder);
  int64_t bytes = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto box = detail::local_part_box(parameters[i].tensor);
    const auto local = detail::writable_part(parameters[i], device);
    if (local.numel() == 0) continue;
    folder->read(names[i], box.offset, local);
    bytes += local.numel() * static_cast<int64_t>(c10::elementSize(folder->at(names[i]).dtype));
  }
  log_info("[models.load] {}: {} parameters, {:.1f} MiB read", dir.string(), parameters.size(),
           static_cast<double>(bytes) / (1 << 20));
}

std::shared_ptr<CausalLM> from_pretrained(const std::filesystem::path& dir, std::optional<c10::ScalarType> dtype,
                                          c10::Device device) {
  const auto config = ModelConfig::from_folder(dir);
  auto model = make_model(config, {.dtype = dtype.value_or(config.dtype.value_or(at::kFloat)), .device = at::kMeta});
  load_pretrained(*model, dir, device);
  return model;
}

}  // namespace tessera
