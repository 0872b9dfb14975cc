// Graphs of an accelerator, such as CUDA graphs: the kernel launches of a thread are captured once and can then be
// replayed with one launch. CUDA's graphs are built in. For another accelerator (PrivateUse1) the vendor's library
// calls register_device_graphs().
//
//   const auto memory = make_graph_pool(device);
//   const auto graph = memory->make_graph();
//   const DeviceStream captures(device);
//   capture(*graph, captures, [&] { y = at::relu(x); });   // launches nothing: y has no values yet
//   x.copy_(values);
//   graph->replay();                                     // on this thread's current stream: y = relu(values)
//
// The memory addresses and host numbers that the kernels get at capture are constants of the graph. Memory that is
// allocated during a capture comes from the graph's GraphPool. A later capture into the same GraphPool may reuse memory
// that was freed; each replay of either graph then overwrites it. So graphs may share a GraphPool only if no result of
// one graph is read after a replay of another. While a thread captures, it may not wait for the device, copy from or to
// memory that is not pinned, or use a random generator of the device that does not support graphs. A graph and its
// memory belong to one rank.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>

#include "tessera/mesh/device_stream.h"

namespace tessera {

class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  // begin_capture() and end_capture() start and end the capture of this thread's current stream, which must not be the
  // default stream. A graph is captured only once.
  virtual void begin_capture() = 0;
  virtual void end_capture() = 0;
  // Launches the graph on the current stream. Replays of graphs with one GraphPool must be ordered one after another.
  virtual void replay() = 0;
};

// A memory pool of graphs. Its memory stays allocated as long as this object or one of its graphs exists.
class GraphPool {
 public:
  virtual ~GraphPool() = default;
  virtual std::unique_ptr<DeviceGraph> make_graph() = 0;  // the graph may outlive this object
};

using GraphPoolFactory = std::function<std::shared_ptr<GraphPool>(c10::Device device)>;
// Sets the function that makes graph pools for a device type; replaces an earlier one. Thread-safe.
void register_device_graphs(c10::DeviceType type, GraphPoolFactory factory);
bool has_device_graphs(c10::DeviceType type);
// Makes a GraphPool for `device`. Error kConfig if has_device_graphs() is false for the type of the device.
std::shared_ptr<GraphPool> make_graph_pool(c10::Device device);

// Captures the launches of `work` on `stream`. If `work` throws, capture() rethrows and the graph must not be used.
void capture(DeviceGraph& graph, const DeviceStream& stream, const std::function<void()>& work);

}  // namespace tessera
