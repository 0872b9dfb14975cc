// Graphs of an accelerator: what a thread launches is kept once, and launched again as one. CUDA has them; for the
// device type that a vendor registered with libtorch (PrivateUse1) the vendor's code registers them.
//
//   const auto memory = make_graph_memory(device);
//   const auto graph = memory->make_graph();
//   const SideStream captures(device);
//   capture(*graph, captures, [&] { y = at::relu(x); });   // launches nothing: y holds nothing yet
//   x.copy_(values);
//   graph->replay();                                     // on this thread's current stream: y = relu(values)
//
// A graph has the addresses and the host's numbers of its capture. What is made during a capture lies in the graph's
// memory; what has been given back there, a later capture into the same memory may take, and both graphs write to it
// with each replay. So graphs may share memory where none of them leaves there what is read after another one's replay.
// While capturing, a thread may not wait for the device, copy from or to memory that is not pinned, or draw from the
// device's generator where that does not know graphs. A graph and its memory belong to one rank.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>

#include "tessera/mesh/side_stream.h"

namespace tessera {

class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  // Between them the launches of this thread's current stream, which is not the default one, are captured; once.
  virtual void begin_capture() = 0;
  virtual void end_capture() = 0;
  // On the current stream. All replays of graphs with one memory must come behind one another.
  virtual void replay() = 0;
};

// Memory stays, given back or not, as long as this or one of its graphs lives.
class GraphMemory {
 public:
  virtual ~GraphMemory() = default;
  virtual std::unique_ptr<DeviceGraph> make_graph() = 0;  // may outlive this
};

using GraphMemoryMaker = std::function<std::shared_ptr<GraphMemory>(c10::Device device)>;
// Takes the place of one that was there. Thread-safe.
void register_device_graphs(c10::DeviceType type, GraphMemoryMaker maker);
bool has_device_graphs(c10::DeviceType type);
// Error kConfig: the device's type has no graphs.
std::shared_ptr<GraphMemory> make_graph_memory(c10::Device device);

// Captures what `work` launches on `stream`. Where it throws, so does this, and the graph is of no use.
void capture(DeviceGraph& graph, const SideStream& stream, const std::function<void()>& work);

}  // namespace tessera
