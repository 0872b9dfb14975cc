// A custom model and a custom training loop on Tessera, with FSDP over all ranks:
//
//   tessera launch --nproc 2 -- build/custom_loop/custom_loop [DEVICE]
//
// The model learns y = sin(x). The program prints the loss every 20 steps and exits with 1 unless the last loss is
// below a tenth of the first. The losses are the same, up to rounding, on any number of ranks.
//
// DEVICE is auto (the default), cpu, cuda, or the name of another accelerator.
#include <ATen/ATen.h>
#include <tessera/fsdp.h>
#include <tessera/optim.h>

#include <cstdio>

using namespace tessera;

struct Layer : nn::Callable<Layer> {
  at::Tensor weight, bias;
  Layer(int64_t in, int64_t out, const at::Generator& random, at::Device device) {
    register_parameter("weight", weight, at::randn({out, in}, random).to(device) / std::sqrt(in));
    register_parameter("bias", bias, at::zeros({out}, device), /*decay=*/false);
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight, bias); }
};

struct Net : nn::Callable<Net> {
  std::shared_ptr<Layer> hidden, out;
  Net(const at::Generator& random, at::Device device)
      : hidden(register_module("hidden", std::make_shared<Layer>(1, 64, random, device))),
        out(register_module("out", std::make_shared<Layer>(64, 1, random, device))) {}
  at::Tensor forward(const at::Tensor& x) { return (*out)(at::tanh((*hidden)(x))); }
};

int train(const std::string& setting) {
  const auto world = comm::World::connect({});
  const auto device = comm::choose_device(*world, {.setting = setting});
  const auto mesh = init_device_mesh(world, c10::DeviceTypeName(device.type(), true), {world->size()}, {"dp"});
  Net net(at::make_generator<at::CPUGeneratorImpl>(1), device);  // the same values on every rank
  fully_shard(*net.hidden, {.mesh = mesh});
  fully_shard(net, {.mesh = mesh});
  const auto optimizer = optim::make_adamw(net, {.lr = 0.02, .weight_decay = 0});

  double first = 0, loss_value = 0;
  for (int step = 0; step < 100; ++step) {
    const auto batch = at::linspace(-1, 4, 240, device).view({-1, 1});
    const auto x = batch.chunk(world->size()).at(world->rank());  // this rank's rows of the batch
    const auto loss = (net(x) - at::sin(x)).pow(2).mean();
    loss.backward();
    optim::clip_grad_norm(net.parameters(), 1.0);
    optimizer->step();
    optimizer->zero_grad();
    const auto mean = loss.detach().clone();
    comm::all_reduce(*mesh->group("dp"), mean, comm::ReduceOp::kAvg).wait();
    loss_value = mean.item<double>();
    if (step == 0) first = loss_value;
    if (world->rank() == 0 && step % 20 == 19) std::printf("step %3d  loss %.5f\n", step + 1, loss_value);
  }
  return loss_value < 0.1 * first ? 0 : 1;
}

int main(int argc, char** argv) {
  try {
    return train(argc > 1 ? argv[1] : "auto");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "custom_loop: %s\n", error.what());
    return exit_code_for(error);
  }
}
