// Saves a sharded checkpoint of an FSDP1 model (flat parameters) and its AdamW optimizer after one step, and loads it
// into a new model that is wrapped in another way:
//
//   tessera launch --nproc 2 -- build/fsdp_checkpoint/fsdp_checkpoint [DEVICE]
//
// The program prints whether all tensors were restored. It exits with 1 unless weights, optimizer state and the loss of
// the next step are the same.
//
// DEVICE is auto (the default), cpu, cuda, or the name of another accelerator.
#include <ATen/ATen.h>
#include <tessera/fsdp.h>
#include <tessera/fsdp1.h>
#include <tessera/state.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

using namespace tessera;

struct Layer : nn::Callable<Layer> {
  at::Tensor weight, bias;
  Layer(int64_t in, int64_t out, const at::Generator& random, at::Device device) {
    register_parameter("weight", weight, at::randn({out, in}, random).to(device) / std::sqrt(in));
    register_parameter("bias", bias, at::zeros({out}, device));
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight, bias); }
};

struct Net : nn::Callable<Net> {
  std::shared_ptr<Layer> hidden, out;
  Net(uint64_t seed, at::Device device) {
    const auto random = at::make_generator<at::CPUGeneratorImpl>(seed);  // the same values on every rank
    hidden = register_module("hidden", std::make_shared<Layer>(3, 13, random, device));
    out = register_module("out", std::make_shared<Layer>(13, 1, random, device));
  }
  at::Tensor forward(const at::Tensor& x) { return (*out)(at::tanh((*hidden)(x))); }
};

struct Training {
  Net net;
  std::unique_ptr<optim::Optimizer> adam;
  at::Device device;
  Training(uint64_t seed, const MeshPtr& mesh, bool use_orig_params)
      : net(seed, mesh->device()), device(mesh->device()) {
    const auto group = mesh->group("dp");
    if (!use_orig_params) wrap_fsdp1(*net.hidden, {.group = group});
    wrap_fsdp1(net, {.group = group, .use_orig_params = use_orig_params});
    adam = optim::make_adamw(net, {.lr = 0.01, .weight_decay = 0});
  }
  double step() {
    const auto x = at::linspace(-1, 1, 24, device).view({8, 3});
    const auto loss = (net(x) - at::sin(x.sum(1, true))).pow(2).mean();
    loss.backward();
    adam->step();
    adam->zero_grad();
    return loss.item<double>();
  }
};

// Returns the tensors of both dicts with their names in the checkpoint.
NamedTensors named(const StateDict& weights, const StateDict& states) {
  NamedTensors tensors;
  for (const auto& [name, value] : weights) tensors.emplace_back("model." + to_string(name), value.tensor());
  for (const auto& [parameter, state] : states.at("state").dict()) {
    for (const auto& [name, value] : state.dict()) {
      tensors.emplace_back("optimizer." + to_string(parameter) + "." + to_string(name), value.tensor());
    }
  }
  return tensors;
}

struct Saved {
  StateDict weights, states;
};
// Returns both dicts with DTensors that are sharded by rows: each rank holds only its own rows.
Saved sharded(Training& training, const MeshPtr& mesh) {
  const auto scope = state_dict_type(training.net, {.type = StateDictType::kSharded, .device_mesh = mesh});
  return {fsdp1_state_dict(training.net), optim_state_dict(training.net, *training.adam)};
}
// Returns the whole tensors, for comparison.
NamedTensors whole(Training& training) {
  return named(fsdp1_state_dict(training.net), optim_state_dict(training.net, *training.adam));
}

int run(const std::shared_ptr<comm::World>& world, at::Device device, const std::filesystem::path& folder) {
  const auto mesh = init_device_mesh(world, c10::DeviceTypeName(device.type(), true), {world->size()}, {"dp"});
  Training trained(/*seed=*/1, mesh, /*use_orig_params=*/false);
  trained.step();
  {
    const auto state = sharded(trained, mesh);
    CheckpointWriter writer({.folder = folder, .world = world, .async = false});
    writer.save(/*step=*/1, named(state.weights, state.states), nlohmann::json::object());
    writer.finish();
  }

  Training fresh(/*seed=*/2, mesh, /*use_orig_params=*/true);
  const auto state = sharded(fresh, mesh);  // the names, shapes and rows that this rank reads
  const auto checkpoint = Checkpoint::latest(folder, *world->group());
  if (!checkpoint) return 1;
  checkpoint->load(named(state.weights, state.states));
  {
    const auto scope = state_dict_type(fresh.net, {.type = StateDictType::kSharded, .device_mesh = mesh});
    load_fsdp1_state_dict(fresh.net, state.weights);
    optim_state_dict_to_load(fresh.net, *fresh.adam, state.states, {.load_directly = true});
  }

  const auto before = whole(trained), after = whole(fresh);
  bool same = before.size() == after.size();
  for (const auto& [name, tensor] : before) {
    const auto found = std::ranges::find_if(after, [&](const auto& each) { return each.first == name; });
    same = same && found != after.end() && tensor.equal(found->second);
  }
  const double next = trained.step(), next_of_fresh = fresh.step();
  if (world->rank() == 0) {
    std::printf("%zu tensors saved by %d ranks and restored: %s; the next step's loss is %.6f and %.6f\n",
                before.size(), world->size(), same ? "the same" : "they differ", next, next_of_fresh);
  }
  return same && std::abs(next - next_of_fresh) < 1e-6 ? 0 : 1;
}

int main(int argc, char** argv) {
  try {
    const auto world = comm::World::connect({});
    const auto device = comm::choose_device(*world, {.setting = argc > 1 ? argv[1] : "auto"});
    std::string folder = (std::filesystem::temp_directory_path() / "fsdp_checkpoint.XXXXXX").string();
    if (world->rank() == 0 && !mkdtemp(folder.data())) {
      std::perror(folder.c_str());
      folder.clear();
    }
    folder = comm::broadcast_bytes(*world->group(), folder);
    if (folder.empty()) return 1;
    const int result = run(world, device, folder);
    comm::barrier(*world->group());
    if (world->rank() == 0) std::filesystem::remove_all(folder);
    return result;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fsdp_checkpoint: %s\n", error.what());
    return exit_code_for(error);
  }
}
