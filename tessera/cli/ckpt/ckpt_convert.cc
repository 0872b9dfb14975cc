#include "tessera/cli/ckpt/ckpt_convert.h"

#include <ATen/ATen.h>

#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/files/staged.h"
#include "tessera/base/text/quote.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/write_dcp.h"
#include "tessera/cli/ckpt/ckpt_files.h"
#include "tessera/formats/companions.h"
#include "tessera/formats/safetensors/safetensors_writer.h"
#include "tessera/formats/tensor_files/finite.h"
#include "tessera/formats/tensor_files/tensor_files.h"
#include "tessera/formats/torch/dcp_folder.h"
#include "tessera/formats/torch/torch_save_writer.h"
#include "tessera/models/adapters/adapters.h"
#include "tessera/models/config/end_tokens.h"
#include "tessera/models/files/weights.h"
#include "tessera/models/gguf/gguf_convert.h"
#include "tessera/train/run/model_source.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

std::optional<c10::ScalarType> parse_weights_dtype(const ConvertOptions& options) {
  const auto& name = options.dtype;
  if (name.empty()) return std::nullopt;
  if (name == "float32" || name == "f32") return at::kFloat;
  if (name == "bfloat16" || name == "bf16") return at::kBFloat16;
  if (name == "float16" || name == "f16") return at::kHalf;
  raise(ErrorKind::kConfig, "[ckpt.convert] --dtype {}: a Hugging Face folder takes float32, bfloat16 or float16",
        name);
}

std::optional<GgmlType> parse_gguf_dtype(const std::string& name) {
  if (name.empty()) return std::nullopt;
  if (name == "float32" || name == "f32") return GgmlType::kF32;
  if (name == "bfloat16" || name == "bf16") return GgmlType::kBF16;
  if (name == "float16" || name == "f16") return GgmlType::kF16;
  if (name == "q8_0") return GgmlType::kQ8_0;
  raise(ErrorKind::kConfig, "[ckpt.convert] --dtype {}: a GGUF file takes float32, bfloat16, float16 or q8_0", name);
}

// The folder whose config.json and tokenizer go with the weights: --config, else the folder of the source, else the
// model that the run of a checkpoint started from. Empty if none of them has a config.json.
fs::path companions_of(const fs::path& source, const ConvertOptions& options) {
  if (!options.config.empty()) {
    TESSERA_CHECK(fs::is_regular_file(options.config / "config.json"), ErrorKind::kConfig,
                  "[ckpt.convert] --config {}: holds no config.json", options.config.string());
    return options.config;
  }
  for (const auto& folder :
       {fs::is_directory(source) ? source : source.parent_path(), train::base_model_folder(source)}) {
    if (fs::is_regular_file(folder / "config.json")) return folder;
  }
  return {};
}

std::string convert_error_prefix(const fs::path& source) { return "[ckpt.convert] " + source.string(); }

std::string missing_config_remark(const fs::path& companions, const fs::path& destination) {
  if (!companions.empty()) return "";
  return fmt::format(
      "{}: holds only weights, because the source has no config.json. Name the model's folder with --config DIR.",
      destination.string());
}

std::string weights_to_folder(const fs::path& source, const fs::path& destination, const ConvertOptions& options) {
  const auto dtype = parse_weights_dtype(options);
  const auto files = TensorFiles::open(source, {.weights_only = true});
  const auto companions = companions_of(source, options);
  std::vector<SafetensorsSpec> specs;
  for (const auto& [name, stored] : files->tensors()) {
    const bool converts = dtype && c10::isFloatingType(stored.dtype);
    specs.push_back({name, converts ? *dtype : stored.dtype, stored.shape});
  }
  StagedFolder folder(destination);
  if (!companions.empty()) copy_config_and_companions(companions, folder.path());
  SafetensorsFolderWriter writer(folder.path(), specs);
  for (const auto& spec : specs) {
    const auto stored = files->tensor(spec.name), converted = stored.to(spec.dtype);
    check_converted(stored, converted, spec.name, convert_error_prefix(source));
    writer.write(spec.name, converted);
  }
  writer.finish();
  folder.publish();
  return missing_config_remark(companions, destination);
}

std::string weights_to_dcp(const fs::path& source, const fs::path& destination, const ConvertOptions& options) {
  TESSERA_CHECK(options.dtype.empty(), ErrorKind::kConfig,
                "[ckpt.convert] --dtype {}: a distributed checkpoint keeps the dtypes of its source", options.dtype);
  const auto files = TensorFiles::open(source, {.weights_only = true});
  TESSERA_CHECK(
      files->format() != TensorFiles::Format::kDcp, ErrorKind::kConfig,
      "[ckpt.convert] {}: is a distributed checkpoint already. To change its files use 'tessera ckpt reshard'.",
      source.string());
  const auto companions = companions_of(source, options);
  const auto check = [&](const std::string& name, const at::Tensor& values) {
    check_finite(values, name, convert_error_prefix(source));
  };
  write_dcp(*files, destination, {.ranks = 1, .prefix = "model.", .companions = companions, .check = check});
  return missing_config_remark(companions, destination);
}

// Verifies the hashes of a run's checkpoint before it is converted. Otherwise damaged values would get new valid
// hashes, or a format without hashes, and the damage could not be found any more.
void check_hashes(const fs::path& source) {
  if (fs::is_directory(source) && DcpFolder::is_dcp_folder(source)) Checkpoint::open(source).verify();
}

// A value of the flat state dict with its path in the nested state dict.
struct StateDictEntry {
  DcpPath path;
  PickleValue value;
};

std::string shown_path(const DcpPath& path) {
  std::string out;
  for (const auto& part : path) {
    const auto* number = std::get_if<int64_t>(&part);
    out += (out.empty() ? "" : ".") + (number ? std::to_string(*number) : std::get<std::string>(part));
  }
  return out;
}

// Rebuilds a nested state dict from flat entries whose paths have the same first `depth` parts. Children of a dict keep
// the order of the entries; children of a list are ordered by index. A path of untrusted metadata cannot make a list
// longer than kLongestList.
PickleValue nested_value(std::vector<StateDictEntry> entries, size_t depth = 0) {
  constexpr int64_t kLongestList = 1 << 20;
  constexpr size_t kLongestPath = 90;  // readers of pickles refuse dicts that are nested deeper
  if (entries.size() == 1 && entries[0].path.size() == depth) return std::move(entries[0].value);
  std::vector<std::pair<DcpPath::value_type, std::vector<StateDictEntry>>> children;  // in the order of the entries
  std::map<DcpPath::value_type, size_t> position;
  for (auto& entry : entries) {
    const auto& path = entry.path;
    const auto* index = path.size() > depth ? std::get_if<int64_t>(&path[depth]) : nullptr;
    const bool fits = path.size() > depth && (!index || (*index >= 0 && *index < kLongestList)) &&
                      (children.empty() || children[0].first.index() == path[depth].index());
    TESSERA_CHECK(path.size() <= kLongestPath, ErrorKind::kFormat,
                  "[ckpt.convert] found a path of {} parts in the state dict, wanted at most {}", path.size(),
                  kLongestPath);
    TESSERA_CHECK(fits, ErrorKind::kFormat, "[ckpt.convert] paths of the state dict contradict each other, at {}",
                  quote(shown_path(path)));
    const auto [found, is_new] = position.try_emplace(path[depth], children.size());
    if (is_new) children.emplace_back(path[depth], std::vector<StateDictEntry>());
    children[found->second].second.push_back(std::move(entry));
  }
  if (!children.empty() && std::holds_alternative<int64_t>(children[0].first)) {
    PickleValue::Items items;
    for (const auto& [key, place] : position) {
      items.resize(static_cast<size_t>(std::get<int64_t>(key)));  // DCP does not save empty dicts in a list
      items.push_back(nested_value(std::move(children[place].second), depth + 1));
    }
    return PickleValue::list(std::move(items));
  }
  std::vector<PickleValue::Pair> pairs;
  for (auto& [key, below] : children) {
    pairs.emplace_back(std::get<std::string>(key), nested_value(std::move(below), depth + 1));
  }
  return PickleValue::dict(std::move(pairs));
}

// Writes the whole nested state dict to one file, like dcp_to_torch_save of torch.
void dcp_to_torch(const fs::path& source, const fs::path& destination) {
  TESSERA_CHECK(!fs::exists(destination), ErrorKind::kIo, "[ckpt.convert] {}: exists already", destination.string());
  const auto folder = DcpFolder::open(source);
  const DcpLookup lookup(folder->metadata());
  TorchSaveWriter writer;
  std::vector<StateDictEntry> entries;
  for (const auto& entry : folder->metadata().entries) {
    const auto* path = lookup.find_path(entry.name);
    const auto value = [&] {
      if (!entry.tensor) return folder->object(entry.name);
      const auto tensor = folder->tensor(entry.name);
      check_finite(tensor, entry.name, convert_error_prefix(source));
      return writer.add(tensor);
    };
    entries.push_back({path ? *path : DcpPath{entry.name}, value()});
  }
  write_torch_save(destination, writer, nested_value(std::move(entries)));
}

// Loads the model and its adapter and saves the merged weights. They are computed in float32 and rounded once.
void merge_adapter(const fs::path& source, const fs::path& destination, const ConvertOptions& options) {
  const auto adapters = read_adapter_config(options.adapter);
  const auto model = from_pretrained(source, std::nullopt, at::kCPU, FolderAdapter::kIgnore);
  add_adapters(*model, adapters);
  load_adapters(*model, options.adapter);
  save_pretrained(*model, destination, source, {.dtype = parse_weights_dtype(options), .merge_adapters = true});
  write_end_tokens(destination, end_tokens(source, model->config()), model->config());
}

}  // namespace

std::string convert_checkpoint(const fs::path& source, const fs::path& destination, const ConvertOptions& options) {
  // Formats that can be converted into each other: GGUF and Hugging Face folder, in both directions; any format of
  // TensorFiles to hf and dcp; a distributed checkpoint to a torch.save file.
  const bool gguf = is_gguf(source);
  const bool plain_folder =
      !gguf && fs::is_directory(source) && TensorFiles::open(source)->format() == TensorFiles::Format::kSafetensors;
  const auto to = !options.to.empty() ? options.to : plain_folder && options.adapter.empty() ? "gguf" : "hf";
  TESSERA_CHECK(to == "hf" || to == "gguf" || to == "dcp" || to == "torch", ErrorKind::kConfig,
                "[ckpt.convert] --to {}: wanted hf, gguf, dcp or torch", to);
  TESSERA_CHECK(options.config.empty() || to == "hf" || to == "dcp", ErrorKind::kConfig,
                "[ckpt.convert] --config {}: can be used only with --to hf and --to dcp", options.config.string());
  TESSERA_CHECK(options.dtype.empty() || to != "torch", ErrorKind::kConfig,
                "[ckpt.convert] --dtype {}: a torch.save file keeps the dtypes of its source", options.dtype);
  TESSERA_CHECK(options.adapter.empty() || (plain_folder && to == "hf"), ErrorKind::kConfig,
                "[ckpt.convert] --adapter {}: can be used only with --to hf and a Hugging Face folder",
                options.adapter.string());
  TESSERA_CHECK(options.adapter.empty() || options.config.empty(), ErrorKind::kConfig,
                "[ckpt.convert] --config {}: cannot be used with --adapter, whose base model has its own config.json",
                options.config.string());
  check_hashes(source);
  if (!options.adapter.empty()) {
    merge_adapter(source, destination, options);
    return "";
  }
  refuse_folder_adapter(source);
  if (gguf && to == "hf") {
    gguf_to_folder(source, destination, {.dtype = parse_weights_dtype(options)});
    return "";
  }
  if (to == "gguf" && plain_folder) {
    folder_to_gguf(source, destination, {.type = parse_gguf_dtype(options.dtype)});
    return "";
  }
  TESSERA_CHECK(!gguf && to != "gguf", ErrorKind::kConfig,
                "[ckpt.convert] {}: GGUF is converted from and to Hugging Face folders only; convert {} first",
                source.string(), gguf ? "it with --to hf" : "this with --to hf");
  if (to == "hf") return weights_to_folder(source, destination, options);
  if (to == "dcp") return weights_to_dcp(source, destination, options);
  TESSERA_CHECK(DcpFolder::is_dcp_folder(source), ErrorKind::kConfig,
                "[ckpt.convert] {}: --to torch needs a distributed checkpoint", source.string());
  dcp_to_torch(source, destination);
  return "";
}

}  // namespace tessera::cli
