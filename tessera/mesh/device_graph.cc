#include "tessera/mesh/device_graph.h"

#include <map>
#include <mutex>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/mesh/detail/cuda_graphs.h"

namespace tessera {
namespace {

struct Factories {
  std::mutex mutex;
  std::map<c10::DeviceType, GraphPoolFactory> by_type;
};

Factories& factories() {
  static auto* const instance = [] {
    auto* made = new Factories;
    if (auto cuda = detail::cuda_graph_pool_factory()) made->by_type[c10::DeviceType::CUDA] = std::move(cuda);
    return made;
  }();
  return *instance;
}

GraphPoolFactory factory_of(c10::DeviceType type) {
  const std::lock_guard lock(factories().mutex);
  const auto found = factories().by_type.find(type);
  return found == factories().by_type.end() ? nullptr : found->second;
}

}  // namespace

void register_device_graphs(c10::DeviceType type, GraphPoolFactory factory) {
  const std::lock_guard lock(factories().mutex);
  factories().by_type[type] = std::move(factory);
}

bool has_device_graphs(c10::DeviceType type) { return factory_of(type) != nullptr; }

std::shared_ptr<GraphPool> make_graph_pool(c10::Device device) {
  const auto factory = factory_of(device.type());
  TESSERA_CHECK(factory, ErrorKind::kConfig,
                "[mesh.device_graph] {}: no graphs of such devices are available. CUDA graphs need a program built "
                "with nvcc (./dev cuda); the library of another accelerator must call register_device_graphs.",
                device.str());
  return factory(device);
}

// The capture must be ended even if `work` throws, because a stream in capture mode cannot be used for anything else.
void capture(DeviceGraph& graph, const DeviceStream& stream, const std::function<void()>& work) {
  const auto entered = stream.make_current();
  graph.begin_capture();
  try {
    work();
  } catch (...) {
    try {
      graph.end_capture();
    } catch (...) {  // caused by the first error
    }
    throw;
  }
  graph.end_capture();
}

}  // namespace tessera
