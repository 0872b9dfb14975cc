// Converts values of a state dict to and from Python's pickle form, for records of checkpoints and messages between
// ranks.
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

// Convert a tensor to the id of a persistent value, and back. An UnpickleTensor throws for an id that it does not know.
using PickleTensor = std::function<PickleValue(const at::Tensor& tensor)>;
using UnpickleTensor = std::function<at::Tensor(const PickleValue& id)>;

// Converts `value` to a pickle; `tensor` converts the tensors in it. Error kShape for a ShardedTensor in `value`, and
// for a tensor when there is no `tensor` function.
PickleValue to_pickle(const StateValue& value, const PickleTensor& tensor = {});
// Converts a pickle to a value of a state dict; `tensor` makes the tensors. Error kFormat for a value that no state
// dict holds: sets, objects of a class, dicts with keys other than text and integers, and persistent values when there
// is no `tensor` function. `name` names the source in messages.
StateValue from_pickle(const PickleValue& value, const std::string& name, const UnpickleTensor& tensor = {});

}  // namespace tessera
