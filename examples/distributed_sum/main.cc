// The sum and the mean of a vector that is sharded over all ranks:
//
//   tessera launch --nproc 4 -- build/distributed_sum/distributed_sum [DEVICE]
//
// Each rank holds a shard. sum() adds the elements of the local shard and returns a Partial; full_tensor() adds the
// partial sums with one all-reduce. The program exits with 1 unless the results are those of one process.
//
// DEVICE is auto (the default), cpu, cuda, or the name of another accelerator.
#include <ATen/ATen.h>
#include <tessera/dtensor.h>

#include <cstdio>

using namespace tessera;

int sum(const std::string& setting) {
  const auto world = comm::World::connect({});
  const auto device = comm::choose_device(*world, {.setting = setting});
  const auto mesh = init_device_mesh(world, c10::DeviceTypeName(device.type(), true), {world->size()});

  const int64_t count = 1'000'003;  // chosen so that the shards are uneven
  const auto numbers = at::arange(1, count + 1, at::device(device).dtype(at::kDouble));
  const auto spread = distribute_tensor(numbers, mesh, {Shard(0)});

  const auto partial = spread.sum();
  const auto total = full_tensor(partial).item<double>();
  const auto mean = full_tensor(spread.mean()).item<double>();
  const auto largest = full_tensor(spread.amax()).item<double>();

  std::printf("rank %d holds %ld numbers, which add up to %.0f\n", world->rank(),
              static_cast<long>(to_local(spread).numel()), to_local(partial).item<double>());
  const double expected = 0.5 * static_cast<double>(count) * static_cast<double>(count + 1);
  if (world->rank() == 0) {
    std::printf("sum %.0f  mean %.1f  largest %.0f  placements of the sum %s\n", total, mean, largest,
                to_string(placements(partial)).c_str());
  }
  return total == expected && mean == expected / static_cast<double>(count) && largest == static_cast<double>(count)
             ? 0
             : 1;
}

int main(int argc, char** argv) {
  try {
    return sum(argc > 1 ? argv[1] : "auto");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "distributed_sum: %s\n", error.what());
    return exit_code_for(error);
  }
}
