// A matrix product over all ranks, for each placement of its operands:
//
//   tessera launch --nproc 4 -- build/matrix_product/matrix_product [DEVICE]
//
// at::mm is the same call each time. If the placements fit, every rank multiplies its local shards without
// communication. A product that is a sum over ranks stays Partial until its full tensor is needed. The program exits
// with 1 unless every product is that of one process.
//
// DEVICE is auto (the default), cpu, cuda, or the name of another accelerator.
#include <ATen/ATen.h>
#include <tessera/dtensor.h>

#include <cstdio>

using namespace tessera;

struct Way {
  const char* what;
  Placement a, b;
};

int multiply(const std::string& setting) {
  const auto world = comm::World::connect({});
  const auto device = comm::choose_device(*world, {.setting = setting});
  const auto mesh = init_device_mesh(world, c10::DeviceTypeName(device.type(), true), {world->size()});
  const auto random = at::make_generator<at::CPUGeneratorImpl>(1);  // the same values on every rank
  const auto a = at::randn({101, 67}, random).to(device), b = at::randn({67, 83}, random).to(device);
  const auto expected = at::mm(a, b);

  bool right = true;
  for (const auto& [what, a_lies, b_lies] :
       {Way{"rows of A", Shard(0), Replicate()}, Way{"columns of B", Replicate(), Shard(1)},
        Way{"columns of A, rows of B", Shard(1), Shard(0)}}) {
    const auto left = distribute_tensor(a, mesh, {a_lies}), other = distribute_tensor(b, mesh, {b_lies});
    CommDebugMode count;
    const auto product = at::mm(left, other);
    const auto in_product = count.total();
    const auto whole = full_tensor(product);
    const double error = (whole - expected).abs().max().item<double>();
    right = right && error < 1e-4;
    if (world->rank() == 0) {
      std::printf("%-24s A %s, B %s: AB %s  collectives: %ld for the product, %ld to see all of it  error %.1e\n", what,
                  to_string(placements(left)).c_str(), to_string(placements(other)).c_str(),
                  to_string(placements(product)).c_str(), static_cast<long>(in_product),
                  static_cast<long>(count.total() - in_product), error);
    }
  }
  return right ? 0 : 1;
}

int main(int argc, char** argv) {
  try {
    return multiply(argc > 1 ? argv[1] : "auto");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "matrix_product: %s\n", error.what());
    return exit_code_for(error);
  }
}
