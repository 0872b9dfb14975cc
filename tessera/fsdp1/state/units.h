// The FSDP1 units of a model as state dicts need them: which original parameter lies where, and what the optimizer
// calls it. No communication.
//
//   const auto model = Fsdp1Units::of(*root);
//   for (const auto& parameter : model.parameters()) ...                  // as the optimizer sees them
//   const auto& unit = model.units().at(0);
//   unit.fqns[i]; unit.place(i).ranges[rank];                            // member i and the elements a rank has of it
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/fsdp1/fully_sharded_data_parallel.h"
#include "tessera/fsdp1/state/flat_range.h"
#include "tessera/nn/module.h"
#include "tessera/state/state_value.h"

namespace tessera {

// A tensor of which each rank of a group has a range, in the order of its storage.
struct FlatPlace {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  bool contiguous = true;
  std::vector<FlatRange> ranges;  // a rank; without sharding all of them are everything
  bool sharded = true;
  std::shared_ptr<comm::Group> group;
  c10::Device device = c10::kCPU;

  int64_t numel() const { return numel_of(shape); }
  const FlatRange& own() const { return ranges[static_cast<size_t>(group->rank())]; }
  // Names of a message: "a.weight" and a state of it.
  FlatPlace named(const std::string& suffix) const;
};

// Of a contiguous tensor that every rank of the group has whole.
FlatPlace replicated_place(const std::string& name, const at::Tensor& tensor,
                           const std::shared_ptr<comm::Group>& group);

struct Fsdp1Unit {
  explicit Fsdp1Unit(std::shared_ptr<FlatParameterHandle> of);

  const FlatParameterLayout& layout() const { return handle->layout(); }
  bool sharded() const { return handle->sharding_strategy() != ShardingStrategy::kNoShard; }
  const FlatPlace& place(size_t member) const { return places[member]; }
  // The whole flat parameter as a 1-d tensor of unpadded_numel() elements.
  FlatPlace flat_place() const;
  // The piece of a member in something that lies as the shard does; a view.
  at::Tensor piece(const at::Tensor& shard, size_t member) const;
  // All names of a member from the root, its FQN first.
  std::vector<std::string> names(size_t member) const;
  // Of each member, whether it requires a gradient now.
  std::vector<bool> trained() const;

  std::shared_ptr<FlatParameterHandle> handle;
  std::vector<std::string> fqns;  // of the members, from the root
  std::vector<FlatPlace> places;
  std::vector<int64_t> offsets;  // of each member's piece in this rank's shard
  // Other names of members, from the root.
  std::vector<std::pair<std::string, size_t>> aliases;
};

class Fsdp1Units {
 public:
  // A parameter as named_parameters() shows it.
  struct Parameter {
    std::string name;
    std::vector<std::string> fqns;
    std::optional<size_t> unit;
    size_t first_member = 0;                // of the unit; as many as there are fqns
    std::vector<std::string> aliases = {};  // other names of one that is in no unit
    // Its entry in a dict by name, under whichever name; for one in no unit. Null when there is none.
    const StateValue* find_in(const StateDict& states) const;
  };

  // Errors kConfig: no unit, units that differ in use_orig_params or in their ranks.
  static Fsdp1Units of(nn::Module& root);
  // `names`: what named_parameters() shows, in order; `aliases`: other names of these, each with the first.
  using Aliases = std::vector<std::pair<std::string, std::string>>;
  Fsdp1Units(const std::vector<std::shared_ptr<FlatParameterHandle>>& handles, const std::vector<std::string>& names,
             const Aliases& aliases = {});

  const std::vector<Fsdp1Unit>& units() const { return units_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  bool use_orig_params() const { return units_[0].layout().use_orig_params(); }
  const std::shared_ptr<comm::Group>& group() const { return units_[0].handle->group(); }
  bool any_sharded() const { return std::ranges::any_of(units_, &Fsdp1Unit::sharded); }
  // nullptr when there is none.
  const Parameter* find(const std::string& name) const;
  // By FQN, other names of shared parameters included.
  const Parameter* find_fqn(const std::string& fqn) const;

 private:
  std::vector<Fsdp1Unit> units_;
  std::vector<Parameter> parameters_;
  std::unordered_map<std::string, size_t> by_name_, by_fqn_;
};

// What of a module belongs to no unit: parameters, each once with all its names, and persistent buffers.
struct UnmanagedTensor {
  std::vector<std::string> names;
  at::Tensor tensor;
  bool is_parameter = true;
  c10::ScalarType saved_dtype = c10::ScalarType::Undefined;  // saved_buffer_dtype() of a buffer
};
std::vector<UnmanagedTensor> unmanaged_tensors(nn::Module& root, const Fsdp1Units& model);

}  // namespace tessera
