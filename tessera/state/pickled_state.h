// Values of a state dict as Python pickles them: records of checkpoints, and messages between ranks.
//
//   write_object_record(to_pickle(StateTuple{{0.9, 0.95}}), sink);
//   StateValue value = from_pickle(unpickle(bytes, "message"), "message", tensor_of);
//
// Thread-safe.
#pragma once

#include <functional>
#include <string>

#include "tessera/formats/torch/pickle_value.h"
#include "tessera/state/state_value.h"

namespace tessera {

// A tensor as the id of a persistent value, and back. from_pickle's function throws for an id that it does not know.
using PickleTensor = std::function<PickleValue(const at::Tensor& tensor)>;
using UnpickleTensor = std::function<at::Tensor(const PickleValue& id)>;

// Error kShape for a ShardedTensor in it, and for a tensor unless `tensor` is given.
PickleValue to_pickle(const StateValue& value, const PickleTensor& tensor = {});
// Error kFormat for what no state dict holds: sets, objects of a class, dicts with other keys than text and integers,
// and persistent values unless `tensor` is given. `name` is for the message.
StateValue from_pickle(const PickleValue& value, const std::string& name, const UnpickleTensor& tensor = {});

}  // namespace tessera
