#include "tessera/mesh/device_graph.h"

#include <map>
#include <mutex>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/mesh/detail/cuda_graphs.h"

namespace tessera {
namespace {

struct Makers {
  std::mutex mutex;
  std::map<c10::DeviceType, GraphMemoryMaker> by_type;
};

Makers& makers() {
  static auto* const instance = [] {
    auto* made = new Makers;
    if (auto cuda = detail::cuda_graph_memory()) made->by_type[c10::DeviceType::CUDA] = std::move(cuda);
    return made;
  }();
  return *instance;
}

GraphMemoryMaker maker_of(c10::DeviceType type) {
  const std::lock_guard lock(makers().mutex);
  const auto found = makers().by_type.find(type);
  return found == makers().by_type.end() ? nullptr : found->second;
}

}  // namespace

void register_device_graphs(c10::DeviceType type, GraphMemoryMaker maker) {
  const std::lock_guard lock(makers().mutex);
  makers().by_type[type] = std::move(maker);
}

bool has_device_graphs(c10::DeviceType type) { return maker_of(type) != nullptr; }

std::shared_ptr<GraphMemory> make_graph_memory(c10::Device device) {
  const auto maker = maker_of(device.type());
  TESSERA_CHECK(maker, ErrorKind::kConfig,
                "[mesh.device_graph] {}: no graphs of such devices are available. CUDA graphs need a program built "
                "with nvcc (./dev cuda); the library of another accelerator must call register_device_graphs.",
                device.str());
  return maker(device);
}

// The capture must be ended even if `work` throws, because a stream in capture mode cannot be used for anything else.
void capture(DeviceGraph& graph, const SideStream& stream, const std::function<void()>& work) {
  const auto entered = stream.enter();
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
