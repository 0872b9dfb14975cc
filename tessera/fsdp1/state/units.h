// The FSDP1 units of a model for state-dict functions: the layout of each original parameter, and the optimizer's name
// for it. No communication.
//
//   const auto model = Fsdp1Units::of(*root);
//   for (const auto& parameter : model.parameters()) ...   // as the optimizer sees them
//   const auto& unit = model.units().at(0);
//   unit.member_layout(i).ranges[rank];                    // the elements of member i that a rank has
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

// The layout of a tensor of which each rank of a group has a range of elements. The range counts elements in the order
// of the storage.
struct FlatTensorLayout {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  bool contiguous = true;
  std::vector<FlatRange> ranges;  // one per rank; without sharding each is the whole tensor
  bool sharded = true;
  std::shared_ptr<comm::Group> group;
  c10::Device device = c10::kCPU;

  int64_t numel() const { return numel_of(shape); }
  const FlatRange& own() const { return ranges[static_cast<size_t>(group->rank())]; }
  // Returns a copy of this layout whose name, which error messages use, has the name of a state appended to it.
  FlatTensorLayout named(const std::string& suffix) const;
};

// Returns the layout of a contiguous tensor that every rank of the group has whole.
FlatTensorLayout replicated_layout(const std::string& name, const at::Tensor& tensor,
                                   const std::shared_ptr<comm::Group>& group);

struct Fsdp1Unit {
  explicit Fsdp1Unit(std::shared_ptr<FlatParameterHandle> of);

  const FlatParameterLayout& layout() const { return handle->layout(); }
  bool sharded() const { return handle->sharding_strategy() != ShardingStrategy::kNoShard; }
  const FlatTensorLayout& member_layout(size_t member) const { return member_layouts[member]; }
  // The layout of the whole flat parameter as a 1-d tensor of unpadded_numel() elements.
  FlatTensorLayout flat_layout() const;
  // `shard`: a 1-d tensor with the layout of this rank's shard of the flat parameter, for example an optimizer state.
  // Returns a view of the elements of `shard` that belong to a member (original parameter) of the unit; the view is
  // empty if this rank has no elements of the member.
  at::Tensor member_shard(const at::Tensor& shard, size_t member) const;
  // Returns all names of a member, as paths from the root module. Its FQN is the first.
  std::vector<std::string> names(size_t member) const;
  // Returns for each member (original parameter) of the unit whether it requires a gradient now.
  std::vector<bool> trained() const;

  std::shared_ptr<FlatParameterHandle> handle;
  std::vector<std::string> fqns;  // of the members, from the root
  std::vector<FlatTensorLayout> member_layouts;
  std::vector<int64_t> offsets;  // of each member's piece in this rank's shard
  // Further names of shared members, from the root, each with the index of the member.
  std::vector<std::pair<std::string, size_t>> aliases;
};

class Fsdp1Units {
 public:
  // A parameter of Module::named_parameters.
  struct Parameter {
    std::string name;
    std::vector<std::string> fqns;
    std::optional<size_t> unit;
    size_t first_member = 0;                // index in the unit; the parameter has as many members as fqns
    std::vector<std::string> aliases = {};  // further names of a parameter outside units
    // Only for a parameter outside units. Returns the value that `states` has under any of the parameter's names, or
    // null.
    const StateValue* find_in(const StateDict& states) const;
  };

  // Returns all FSDP1 units of `root` and all parameters of `root`. Errors kConfig: a model without units, units that
  // differ in use_orig_params or in their ranks.
  static Fsdp1Units of(nn::Module& root);
  // `names`: the names of named_parameters(), in order. `aliases`: pairs of a further name and the first name of its
  // parameter.
  using Aliases = std::vector<std::pair<std::string, std::string>>;
  Fsdp1Units(const std::vector<std::shared_ptr<FlatParameterHandle>>& handles, const std::vector<std::string>& names,
             const Aliases& aliases = {});

  const std::vector<Fsdp1Unit>& units() const { return units_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  bool use_orig_params() const { return units_[0].layout().use_orig_params(); }
  const std::shared_ptr<comm::Group>& group() const { return units_[0].handle->group(); }
  bool any_sharded() const { return std::ranges::any_of(units_, &Fsdp1Unit::sharded); }
  // Finds a parameter by Parameter::name; nullptr if no parameter has this name.
  const Parameter* find(const std::string& name) const;
  // Finds a parameter by FQN or by a further name of a shared parameter.
  const Parameter* find_fqn(const std::string& fqn) const;

 private:
  std::vector<Fsdp1Unit> units_;
  std::vector<Parameter> parameters_;
  std::unordered_map<std::string, size_t> by_name_, by_fqn_;
};

// A tensor of a module outside all units: a parameter, once with all its names, or a persistent buffer.
struct UnmanagedTensor {
  std::vector<std::string> names;
  at::Tensor tensor;
  bool is_parameter = true;
  c10::ScalarType saved_dtype = c10::ScalarType::Undefined;  // for a buffer: saved_buffer_dtype()
};
std::vector<UnmanagedTensor> unmanaged_tensors(nn::Module& root, const Fsdp1Units& model);

}  // namespace tessera
