// Trains a linear layer whose weight is sharded over all ranks; each rank holds some output features:
//
//   tessera launch --nproc 4 -- build/sharded_linear/sharded_linear [DEVICE]
//
// The loop is that of a single process: weight and bias are DTensors, and autograd and the update work on DTensors. The
// program prints the loss every 20 steps. It exits with 1 unless weight and losses are those of one process.
//
// DEVICE is auto (the default), cpu, cuda, or the name of another accelerator.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <tessera/dtensor.h>
#include <tessera/nn.h>

#include <cmath>
#include <cstdio>

using namespace tessera;

// Minimizes the mean squared error by gradient descent. Returns the loss before each step.
std::vector<double> train(at::Tensor& weight, at::Tensor& bias, const at::Tensor& x, const at::Tensor& y) {
  std::vector<double> losses;
  for (int step = 0; step < 60; ++step) {
    const auto loss = (at::linear(x, weight, bias) - y).pow(2).mean();
    loss.backward();
    losses.push_back(loss.item<double>());
    const at::NoGradGuard no_grad;
    for (auto* parameter : {&weight, &bias}) {
      parameter->sub_(parameter->grad(), 3.0);
      parameter->mutable_grad().reset();
    }
  }
  return losses;
}

int run(const std::string& setting) {
  const auto world = comm::World::connect({});
  const auto device = comm::choose_device(*world, {.setting = setting});
  const auto mesh = init_device_mesh(world, c10::DeviceTypeName(device.type(), true), {world->size()}, {"tp"});
  const auto random = at::make_generator<at::CPUGeneratorImpl>(1);  // the same values on every rank
  const auto x = at::randn({64, 12}, random).to(device), truth = at::randn({10, 12}, random).to(device);
  const auto y = at::linear(x, truth) + 0.5;

  const auto zeros = [&](at::IntArrayRef shape) { return at::zeros(shape, device); };
  auto plain_weight = zeros({10, 12}).set_requires_grad(true), plain_bias = zeros({10}).set_requires_grad(true);
  const auto expected = train(plain_weight, plain_bias, x, y);

  auto weight = distribute_tensor(zeros({10, 12}), mesh, {Shard(0)}).set_requires_grad(true);
  auto bias = distribute_tensor(zeros({10}), mesh, {Shard(0)}).set_requires_grad(true);
  const auto losses =
      train(weight, bias, distribute_tensor(x, mesh, {Replicate()}), distribute_tensor(y, mesh, {Replicate()}));

  double worst = 0;
  for (size_t i = 0; i < losses.size(); ++i) {
    worst = std::max(worst, std::abs(losses[i] - expected[i]) / (expected[i] + 1e-6));
  }
  const double distance = (full_tensor(weight.detach()) - plain_weight.detach()).abs().max().item<double>();
  if (world->rank() == 0) {
    for (size_t i = 0; i < losses.size(); i += 20) std::printf("step %2zu  loss %.6f\n", i, losses[i]);
    std::printf("step %2zu  loss %.6f  weight %s, %ld of 10 rows on rank 0, %.1e from one process\n", losses.size(),
                losses.back(), to_string(placements(weight)).c_str(),
                static_cast<long>(to_local(weight.detach()).size(0)), distance);
  }
  return losses.back() < 0.01 * losses.front() && worst < 1e-3 && distance < 1e-4 ? 0 : 1;
}

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? argv[1] : "auto");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sharded_linear: %s\n", error.what());
    return exit_code_for(error);
  }
}
