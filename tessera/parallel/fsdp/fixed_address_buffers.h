// Accelerator memory that is handed out at the same address every time, for unsharded parameters that a CUDA graph of
// their layer reads. Groups that are gathered one after the other, two at a time, alternate between two buffers. A
// group that stays gathered has a buffer of its own.
//
//   FixedPlaces places(device);
//   const size_t place = places.add_in_turn(bytes);      // call for all groups before the first take()
//   c10::DataPtr memory = places.take(place);            // null while another group holds the buffer
//
// A buffer that is taken again must be written after its last use on the stream. Belongs to one rank; the memory may
// outlive this object.
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
  size_t add_in_turn(size_t bytes);  // one of the two shared buffers, alternating with each call
  size_t add(size_t bytes);          // a buffer of its own
  // The memory of a buffer, allocated at its first use and given back when the pointer is destroyed. Null while it is
  // taken.
  c10::DataPtr take(size_t place);

 private:
  struct Place;
  c10::Device device_;
  std::vector<std::shared_ptr<Place>> places_;
  std::vector<size_t> in_turn_;
  size_t turns_ = 0;
};

}  // namespace tessera
