#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/formats/safetensors_writer.h"
#include "tessera/models/detail/local_part.h"
#include "tessera/models/weights.h"

namespace tessera {
namespace {

constexpr const char* kCompanions[] = {"generation_config.json",
                                       "tokenizer.json",
                                       "tokenizer_config.json",
                                       "special_tokens_map.json",
                                       "added_tokens.json",
                                       "vocab.json",
                                       "merges.txt",
                                       "tokenizer.model",
                                       "chat_template.jinja",
                                       "chat_template.json"};

// The folder as it grows; lives on the writing rank alone.
class FolderInProgress {
 public:
  FolderInProgress(const CausalLM& model, const std::vector<detail::SharedParameter>& parameters,
                   const std::filesystem::path& dir, const std::filesystem::path& source_dir,
                   const SaveOptions& options)
      : folder_(dir),
        weights_(folder_.path(), specs(parameters, options), {.max_shard_bytes = options.max_shard_bytes}) {
    const auto dtype = options.dtype.value_or(parameters.front().tensor.scalar_type());
    publish_file(folder_.path() / "config.json", model.config().to_json(dtype));
    if (source_dir.empty()) return;
    for (const char* name : kCompanions) {
      if (std::filesystem::is_regular_file(source_dir / name)) {
        publish_file(folder_.path() / name, read_file(source_dir / name));
      }
    }
  }
  void write(const std::string& name, const at::Tensor& value) { weights_.write(name, value); }
  void publish() {
    weights_.finish();
    folder_.publish();
  }

 private:
  static std::vector<TensorSpec> specs(const std::vector<detail::SharedParameter>& parameters,
                                       const SaveOptions& options) {
    std::vector<TensorSpec> out;
    for (const auto& parameter : parameters) {
      out.push_back({parameter.names.front(), options.dtype.value_or(parameter.tensor.scalar_type()),
                     parameter.tensor.sizes().vec()});
    }
    return out;
  }
  StagedFolder folder_;
  SafetensorsFolderWriter weights_;
};

// How the writing rank fared, as bytes that the others can throw again.
struct Outcome {
  std::optional<Error> error;
  template <class F>
  void attempt(F&& step) {
    if (error) return;
    try {
      step();
    } catch (const Error& failed) {
      error = failed;
    } catch (const std::exception& failed) {
      error = Error(ErrorKind::kInternal, fmt::format("[models.save] {}", failed.what()));
    }
  }
  std::string bytes() const {
    return error ? fmt::format("{}{}", static_cast<char>('1' + static_cast<int>(error->kind())), error->what()) : "0";
  }
  static void throw_if_failed(const std::string& bytes) {
    if (bytes != "0") throw Error(static_cast<ErrorKind>(bytes.at(0) - '1'), bytes.substr(1));
  }
};

MeshPtr mesh_of(const std::vector<detail::SharedParameter>& parameters) {
  for (const auto& parameter : parameters) {
    if (is_dtensor(parameter.tensor)) return device_mesh(parameter.tensor);
  }
  return nullptr;
}

}  // namespace

void save_pretrained(CausalLM& model, const std::filesystem::path& dir, const std::filesystem::path& source_dir,
                     const SaveOptions& options) {
  at::NoGradGuard no_grad;
  const auto parameters = detail::shared_parameters(model);
  const auto mesh = mesh_of(parameters);
  const bool writes = !mesh || mesh->rank() == mesh->ranks().front();
  Outcome outcome;
  std::optional<FolderInProgress> folder;
  if (writes) outcome.attempt([&] { folder.emplace(model, parameters, dir, source_dir, options); });
  for (const auto& parameter : parameters) {
    // Also after an error: the other ranks are in the same collective.
    const auto whole = is_dtensor(parameter.tensor) ? full_tensor(parameter.tensor) : parameter.tensor;
    if (!writes) continue;
    outcome.attempt([&] {
      TESSERA_CHECK(!whole.is_meta(), ErrorKind::kInternal,
                    "[models.save] {}: has no values yet. Load or initialise first.", parameter.names.front());
      folder->write(parameter.names.front(),
                    whole.detach().to(options.dtype.value_or(whole.scalar_type())).contiguous());
    });
  }
  if (writes) outcome.attempt([&] { folder->publish(); });
  folder.reset();
  auto result = outcome.bytes();
  if (mesh && mesh->size() > 1) {
    const auto line = mesh->ndim() == 1 ? mesh : mesh->flatten();
    result = comm::broadcast_bytes(*line->group(0), result);
  }
  Outcome::throw_if_failed(result);
}

}  // namespace tessera
