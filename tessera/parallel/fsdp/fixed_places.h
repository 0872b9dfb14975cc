// Memory of an accelerator that is handed out at the same address again: whole parameters that a graph of their layer
// was captured with. Groups that are gathered one after the other, of which two are there at a time, take turns in two
// places; one that stays gathered has its own.
//
//   FixedPlaces places(device);
//   const size_t place = places.add_in_turn(bytes);      // all of them before the first take()
//   c10::DataPtr memory = places.take(place);            // null while another group has it
//
// A place that is taken again must be written in the order of the stream that used it last. Belongs to one rank; memory
// may outlive this.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace tessera {

class FixedPlaces {
 public:
  explicit FixedPlaces(c10::Device device) : device_(device) {}
  size_t add_in_turn(size_t bytes);  // the one of two that the last call did not give
  size_t add(size_t bytes);          // its own
  c10::DataPtr take(size_t place);

 private:
  struct Place;
  c10::Device device_;
  std::vector<std::shared_ptr<Place>> places_;
  std::vector<size_t> in_turn_;
  size_t turns_ = 0;
};

}  // namespace tessera
