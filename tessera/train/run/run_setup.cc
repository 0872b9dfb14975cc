#include "tessera/train/run/run_setup.h"

#include <ATen/Context.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/version.h"
#include "tessera/comm/backends/device_backends.h"
#include "tessera/comm/backends/fake_backend.h"
#include "tessera/comm/backends/nccl_backend.h"
#include "tessera/comm/collectives/gather_names.h"
#include "tessera/comm/rendezvous/device_choice.h"
#include "tessera/kernels/linear/linear.h"
#include "tessera/models/adapters/adapters.h"
#include "tessera/models/files/weights.h"
#include "tessera/nn/linear/float8.h"
#include "tessera/nn/linear/quantized_linear.h"
#include "tessera/parallel/parallelize_model.h"
#include "tessera/state/state_dict.h"
#include "tessera/train/output/run_mark.h"
#include "tessera/train/recipe/parameter_groups.h"
#include "tessera/train/recipe/recipe_schema.h"
#include "tessera/train/recipe/recipe_value.h"
#include "tessera/train/run/run_layout.h"

namespace tessera::train {
namespace {

c10::ScalarType dtype_of(const std::string& key, const std::string& name) {
  const auto dtype = parse_dtype_name(name);
  TESSERA_CHECK(dtype.has_value(), ErrorKind::kConfig,
                "[train.recipe] {}: '{}' is no dtype. Use float32, bfloat16 or float16.", key, name);
  return *dtype;
}

comm::DeviceRequest device_request(const Recipe& recipe) {
  return {.setting = recipe.train.device, .backend = recipe.comm.backend, .key = "train.device"};
}

// Makes libtorch use deterministic kernels in the whole process. An operation of an accelerator without such a kernel
// throws when it runs.
void use_deterministic_kernels() {
  auto& context = at::globalContext();
  context.setDeterministicAlgorithms(true, /*warn_only=*/false);
  context.setDeterministicFillUninitializedMemory(false);  // not needed: no code here reads memory before writing it
  context.setDeterministicCuDNN(true);
  context.setBenchmarkCuDNN(false);
  ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);  // cuBLAS reads it when it is initialised
}

// The device type of the mesh; applies the process-wide settings first. NCCL supports CUDA tensors only, so
// comm.backend=nccl with device auto selects cuda. COLLECTIVE over the world.
std::string mesh_device(const Recipe& recipe, comm::World& world) {
  auto request = device_request(recipe);
  if (recipe.train.deterministic) use_deterministic_kernels();
  comm::set_device_backend_settings(
      {.high_priority_streams = recipe.comm.high_priority_streams, .split_groups = recipe.comm.split_groups});
  if (recipe.comm.backend == "nccl") {
    const std::string reason = comm::why_no_nccl(world.info().local_size);
    TESSERA_CHECK(reason.empty(), ErrorKind::kConfig, "[train.mesh] comm.backend=nccl: {}. Use comm.backend=gloo.",
                  reason);
    if (request.setting == "auto") request.setting = "cuda";
  }
  const c10::Device device = comm::choose_device(world, request);
  if (!device.is_cpu()) log_info("[train.device] {}", device.str());
  return c10::DeviceTypeName(device.type(), /*lower_case=*/true);
}

}  // namespace

ModelConfig load_model_config(const Recipe& recipe) {
  auto config = ModelConfig::from_folder(recipe.model.path);
  TESSERA_CHECK(recipe.data.sequence_length <= config.context_tokens, ErrorKind::kConfig,
                "[train.recipe] data.sequence_length: {} tokens, but the model of {} has a context of {}. Lower it.",
                recipe.data.sequence_length, recipe.model.path, config.context_tokens);
  config.experts.capacity_factor = recipe.model.expert_capacity_factor;
  return config;
}

std::filesystem::path weights_path(const Recipe& recipe) {
  return recipe.model.weights.empty() ? recipe.model.path : recipe.model.weights;
}

namespace {

// The files that hold weights: `path` itself, or the weight files directly in this folder. Links are resolved, so that
// a fingerprint is that of the file and not of the name in the Hub's cache.
std::vector<std::filesystem::path> weight_files(const std::filesystem::path& path) {
  const auto source = std::filesystem::canonical(path);
  if (!std::filesystem::is_directory(source)) return {source};
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(source)) {
    const auto name = entry.path().filename().string();
    if (name.ends_with(".safetensors") || name.ends_with(".distcp") ||
        (name.starts_with("pytorch_model") && name.ends_with(".bin"))) {
      files.push_back(std::filesystem::canonical(entry.path()));
    }
  }
  return files;
}

}  // namespace

// The hash of config.json (or of the GGUF file), the hash of the adapters, and the sorted hashes of the weight files.
// File names are not hashed, so that hosts may store the same model under different paths.
std::string model_fingerprint(const Recipe& recipe) {
  const auto folder = std::filesystem::canonical(recipe.model.path);  // resolves the links of the Hub's cache
  const bool is_file = !std::filesystem::is_directory(folder);
  std::string identity = fingerprint_of(is_file ? folder : std::filesystem::canonical(folder / "config.json"));
  if (!recipe.lora.path.empty()) {
    identity += "-" + fingerprint_of(std::filesystem::weakly_canonical(adapter_weights_file(recipe.lora.path)));
  }
  if (is_file && recipe.model.weights.empty()) return identity;
  if (recipe.model.init == "random") return identity + "-random";
  std::vector<std::string> hashes;
  for (const auto& file : weight_files(weights_path(recipe))) hashes.push_back(fingerprint_of(file));
  std::ranges::sort(hashes);
  for (const auto& hash : hashes) identity += "-" + hash;
  return identity;
}

comm::NamedValues run_facts(const Recipe& recipe, const RunData& data, const std::string& model) {
  const std::string& resume = recipe.checkpoint.resume;
  const bool from_folder = resume != "auto" && resume != "never";
  comm::NamedValues facts = {{"the program's version", version()},
                             {"checkpoint.resume", from_folder ? "a folder" : resume}};
  auto copy = recipe;
  for (const auto& key : recipe_keys()) {
    const auto path = key.path();
    // Paths are not compared, because hosts may mount the same files at different paths. Hashes of the data and of the
    // model are compared instead; they are appended to `facts` after this loop.
    if (path == "model.path" || path == "model.weights" || path == "model.lora.path" || path == "data.train" ||
        path == "data.validation" || path == "data.cache" || path == "checkpoint.dir" || path == "checkpoint.resume") {
      continue;
    }
    facts.emplace_back(path, format_value(key, copy));
  }
  const auto content = [](const std::shared_ptr<const data::Dataset>& set) {
    return set ? fmt::format("{} rows of hash {}", set->rows(), set->fingerprint()) : "nothing";
  };
  facts.emplace_back("data.train", content(data.train));
  facts.emplace_back("data.validation", content(data.validation));
  facts.emplace_back("the model", model);
  return facts;
}

std::string describe_run_device(const Recipe& recipe, int64_t ranks) {
  return comm::describe_device(device_request(recipe), static_cast<int>(ranks));
}

RunMesh build_run_mesh(const Recipe& recipe, const std::shared_ptr<comm::World>& world) {
  kernels::synchronize_kernel_choices(*world->group());
  return {resolve_layout(recipe, world->size()), mesh_device(recipe, *world), world};
}

namespace {

// This rank's stages of the model, on the meta device, before parallelize_model. Trained parameters are in float32 with
// optimizer.master_weights, else in model.dtype. With adapters only the adapters are trained; the frozen base is in
// model.dtype. The order matters: adapters wrap the linears that quantization has replaced, and stages are cut last,
// when all modules exist.
std::shared_ptr<CausalLM> make_stages(const Recipe& recipe, const ModelConfig& config, const MeshPtr& mesh) {
  const auto own = dtype_of("model.dtype", recipe.model.dtype),
             trained_dtype = recipe.optimizer.master_weights ? at::kFloat : own;
  const auto adapters = adapter_config(recipe);
  auto model = make_model(config, {.dtype = adapters ? own : trained_dtype, .device = c10::Device(at::kMeta)});
  // Linears are quantized before add_adapters(), because adapters wrap the quantized linears.
  if (const auto& quantization = recipe.lora.quantize; quantization != "none") {
    nn::quantize_linears(*model, {.format = quantization == "gguf" ? nn::Quantization::kGguf : nn::Quantization::kNf4,
                                  .double_quant = recipe.lora.double_quant});
  }
  if (adapters) add_adapters(*model, *adapters, trained_dtype);
  if (recipe.precision.fp8) nn::convert_to_float8(*model);
  keep_stages(*model, pipeline_options(recipe, config, mesh));
  return model;
}

}  // namespace

int64_t count_parameters(CausalLM& model) {
  int64_t count = 0;
  for (const auto& parameter : model.parameters()) count += parameter.numel();
  return count;
}

void check_parameter_groups(const Recipe& recipe, const ModelConfig& config) {
  if (recipe.optimizer.groups.empty()) return;
  const auto whole = make_model(config, {.device = c10::Device(at::kMeta)});
  if (const auto adapters = adapter_config(recipe)) add_adapters(*whole, *adapters);
  parameter_groups(recipe.optimizer.groups, *whole, recipe.optimizer.lr, recipe.optimizer.weight_decay);
}

std::shared_ptr<CausalLM> lay_out_model(const Recipe& recipe, const ModelConfig& config, const MeshPtr& mesh) {
  auto options = layout_options(recipe.parallel, mesh);
  options.mp_policy = {.param_dtype = dtype_of("precision.param", recipe.precision.param),
                       .reduce_dtype = dtype_of("precision.reduce", recipe.precision.reduce),
                       .output_dtype = dtype_of("precision.output", recipe.precision.output)};
  options.activation_checkpointing = parse_activation_checkpointing(recipe.parallel.activation_checkpointing);
  options.layer_graphs = recipe.train.layer_graphs;
  auto model = make_stages(recipe, config, mesh);
  parallelize_model(*model, options);
  return model;
}

// The fake world answers collectives without other ranks, and tensors on the meta device have no memory. So the code
// that lays out the real model can run here to find its errors.
void check_parallel_model(const Recipe& recipe, const RunLayout& layout, const ModelConfig& config, int64_t rank) {
  if (layout.ranks_of_stage() == 1) return;
  const int64_t ranks = layout.pp * layout.ranks_of_stage();
  const auto world = comm::World::create_fake(static_cast<int>(rank), static_cast<int>(ranks),
                                              std::make_shared<comm::FakeCostAccount>());
  lay_out_model(recipe, config, RunMesh(layout, "cpu", world).mesh());
}

std::shared_ptr<CausalLM> build_model(const Recipe& recipe, const ModelConfig& config, const MeshPtr& mesh) {
  auto model = lay_out_model(recipe, config, mesh);
  to_empty(*model, mesh->device());
  if (recipe.model.init == "random") {
    init_weights(*model, static_cast<uint64_t>(recipe.train.seed));
  } else {
    load_pretrained(*model, weights_path(recipe));
  }
  if (!recipe.lora.path.empty()) {
    load_adapters(*model, recipe.lora.path);
  } else if (recipe.lora.is_enabled()) {
    init_adapters(*model, static_cast<uint64_t>(recipe.train.seed));
  }
  return model;
}

std::string describe_precision(const Recipe& recipe) {
  const auto& dtype = recipe.model.dtype;
  if (recipe.lora.is_enabled()) {
    return fmt::format(
        "[train.precision] model.dtype={}: the dtype of the base model, which is frozen; adapters and optimizer "
        "state are {}.",
        dtype, recipe.optimizer.master_weights ? "float32" : dtype);
  }
  if (recipe.optimizer.master_weights) {
    return fmt::format(
        "[train.precision] model.dtype={}: parameters and optimizer state are kept in float32 while training, the "
        "exported model is {}. optimizer.master_weights=false halves their memory and rounds each update.",
        dtype, dtype);
  }
  if (recipe.optimizer.stochastic_rounding) {
    return fmt::format(
        "[train.precision] optimizer.stochastic_rounding=true: parameters are {} without a float32 copy and are "
        "rounded at random by train.seed={}; optimizer state is float32.",
        dtype, recipe.train.seed);
  }
  return fmt::format(
      "[train.precision] optimizer.master_weights=false: parameters and optimizer state are {}; updates below about "
      "1/256 of a parameter are lost.",
      dtype);
}

std::unique_ptr<optim::Optimizer> build_optimizer(const Recipe& recipe, CausalLM& model) {
  const auto& section = recipe.optimizer;
  const auto seed = static_cast<uint64_t>(recipe.train.seed);
  // Empty groups are allowed here, because a pipeline stage may have no parameter of a group; check_parameter_groups()
  // has checked them for the whole model.
  auto groups = parameter_groups(section.groups, model, section.lr, section.weight_decay, EmptyGroups::kLeftOut);
  if (section.name == "sgd") {
    return optim::make_sgd(model, {.lr = section.lr,
                                   .weight_decay = section.weight_decay,
                                   .groups = std::move(groups),
                                   .master_weights = section.master_weights,
                                   .stochastic_rounding = section.stochastic_rounding,
                                   .seed = seed});
  }
  const optim::AdamWOptions adamw{.lr = section.lr,
                                  .beta1 = section.betas.at(0),
                                  .beta2 = section.betas.at(1),
                                  .eps = section.eps,
                                  .weight_decay = section.weight_decay,
                                  .groups = groups,
                                  .master_weights = section.master_weights,
                                  .stochastic_rounding = section.stochastic_rounding,
                                  .seed = seed};
  if (section.name == "adamw8bit") return optim::make_adamw8bit(model, {adamw});
  if (section.name == "muon") {
    return optim::make_muon(model, {.lr = section.lr,
                                    .weight_decay = section.weight_decay,
                                    .momentum = section.momentum,
                                    .nesterov = section.nesterov,
                                    .ns_steps = section.ns_steps,
                                    .adjust_lr_fn = section.adjust_lr_fn,
                                    .adamw = adamw,
                                    .groups = std::move(groups),
                                    .master_weights = section.master_weights,
                                    .stochastic_rounding = section.stochastic_rounding,
                                    .seed = seed});
  }
  return optim::make_adamw(model, adamw);
}

TrainingState training_state(CausalLM& model, optim::Optimizer& optimizer) {
  // In a run with adapters the frozen base weights are not saved: a resumed run reads them again from model.path. A
  // pipeline stage of such a run may have no adapter at all. So if all parameters of this stage are frozen, the run is
  // taken to be one with adapters.
  const auto base = model.parameters();
  const bool frozen = std::ranges::none_of(base, [](const at::Tensor& each) { return each.requires_grad(); });
  const auto [weights, states] = get_state_dict(
      model, {&optimizer},
      {.ignore_frozen_params = frozen || !adapted_linears(model).empty(), .flatten_optimizer_state_dict = true});
  TrainingState out;
  const auto add = [&](const std::string& prefix, const StateDict& dict) {
    for (const auto& [key, value] : dict) {
      const auto name = prefix + to_string(key);
      if (value.is_tensor()) {
        out.tensors.emplace_back(name, value.tensor());
      } else {
        out.objects.emplace_back(name, value);
      }
    }
  };
  add("model.", weights);
  add("optim.", states);
  return out;
}

// Returns the tensors and objects of `state` that this pipeline stage saves. A name that several stages have is saved
// by the first of these stages: all stages exchange their names, and each stage drops the names that earlier stages
// have.
TrainingState tensors_saved_by_stage(const TrainingState& state, comm::Group& pipeline) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : state.tensors) names.push_back(name);
  for (const auto& [name, object] : state.objects) names.push_back(name);
  const auto all = comm::gather_names(pipeline, names);
  std::set<std::string> earlier;
  for (int stage = 0; stage < pipeline.rank(); ++stage) {
    const auto& theirs = all[static_cast<size_t>(stage)];
    earlier.insert(theirs.begin(), theirs.end());
  }
  TrainingState own = state;
  const auto drop = [&](auto& list) {
    std::erase_if(list, [&](const auto& entry) { return earlier.contains(entry.first); });
  };
  drop(own.tensors);
  drop(own.objects);
  return own;
}

std::optional<int64_t> total_rows(const Recipe& recipe, const data::Dataset& dataset) {
  if (recipe.train.steps) return std::nullopt;
  return recipe.train.epochs.value_or(1) * dataset.rows();
}

int64_t steps_for_rows(const Recipe& recipe, int64_t rows) {
  return (rows + recipe.train.global_batch_size - 1) / recipe.train.global_batch_size;
}

int64_t total_steps(const Recipe& recipe, const data::Dataset& dataset) {
  const auto rows = total_rows(recipe, dataset);
  return rows ? steps_for_rows(recipe, *rows) : *recipe.train.steps;
}

}  // namespace tessera::train
