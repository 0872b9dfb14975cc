#include "tessera/parallel/fsdp/fixed_places.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>

namespace tessera {

struct FixedPlaces::Place {
  size_t bytes = 0;
  bool taken = false;
  c10::DataPtr memory;
};

// A shared buffer is as large as the largest of its groups. All groups are added before the first take() allocates, so
// the size is final by then.
size_t FixedPlaces::add_in_turn(size_t bytes) {
  constexpr size_t kInTurn = 2;
  const size_t turn = turns_++ % kInTurn;
  if (turn == in_turn_.size()) in_turn_.push_back(add(0));
  auto& place = *places_[in_turn_[turn]];
  place.bytes = std::max(place.bytes, bytes);
  return in_turn_[turn];
}

size_t FixedPlaces::add(size_t bytes) {
  places_.push_back(std::make_shared<Place>(Place{.bytes = bytes, .memory = {}}));
  return places_.size() - 1;
}

c10::DataPtr FixedPlaces::take(size_t place) {
  const auto& found = places_[place];
  if (found->taken) return {};
  if (!found->memory) {
    const c10::DeviceGuard guard(device_);
    found->memory = c10::GetAllocator(device_.type())->allocate(found->bytes);
  }
  found->taken = true;
  // The returned pointer keeps the buffer alive, so it may outlive this object. Its deleter only marks the buffer as
  // free: the address stays reserved.
  const auto give_back = [](void* context) {
    const std::unique_ptr<std::shared_ptr<Place>> kept(static_cast<std::shared_ptr<Place>*>(context));
    (*kept)->taken = false;
  };
  return {found->memory.get(), new std::shared_ptr<Place>(found), give_back, device_};
}

}  // namespace tessera
