// The parameters and buffers of a model by their names (FQNs) in state dicts. No communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tessera/nn/module.h"
#include "tessera/state/state_dict.h"

namespace tessera {

// Removes the prefixes of PyTorch's wrappers (_orig_mod, _fsdp_wrapped_module, _checkpoint_wrapped_module) from a name.
std::string clean_fqn(const std::string& name);
// Maps clean_fqn of each key to its value. Error kShape when two keys give one name; its message begins with `where`.
using ValuesByName = std::unordered_map<std::string, const StateValue*>;
ValuesByName values_by_clean_fqn(const StateDict& state_dict, const char* where);
// Formats names for a message, in quotes: the first 20 names and the number of further names.
std::string quoted_list(const std::vector<std::string>& names);

class ModelTensorNames {
 public:
  struct NamedTensor {
    std::vector<std::string> names;          // all names of the tensor, in the order of the modules
    nn::ParameterSlot* parameter = nullptr;  // null for a buffer
    at::Tensor* buffer = nullptr;
    const at::Tensor& tensor() const { return parameter ? parameter->parameter : *buffer; }
  };
  // Lists the parameters and persistent buffers of the model with their names, as options.fqn_modifier changes them.
  // Error kConfig when two tensors get one name, for example from options.fqn_modifier.
  ModelTensorNames(nn::Module& model, const StateDictOptions& options);

  // One entry for each parameter and each persistent buffer; a tensor with several names has one entry.
  const std::vector<NamedTensor>& entries() const { return entries_; }
  // Every name with the index of its tensor in entries(), in the order of the modules.
  const std::vector<std::pair<std::string, size_t>>& names() const { return names_; }
  // Returns the entry of entries() whose tensor is `parameter`, or nullptr if the model does not have this tensor.
  const NamedTensor* find(const at::Tensor& parameter) const;

 private:
  void visit(nn::Module& module, const std::string& prefix, const StateDictOptions& options);
  void add(const std::string& fqn, const NamedTensor& entry, const StateDictOptions& options);
  std::vector<NamedTensor> entries_;
  std::vector<std::pair<std::string, size_t>> names_;
  std::unordered_map<const c10::TensorImpl*, size_t> by_tensor_;
};

// Returns options.group, or the group of all ranks in the world of the first DTensor, or null for a model without
// DTensors. COLLECTIVE over all ranks when the world has no such group yet.
std::shared_ptr<comm::Group> group_of(const ModelTensorNames& model, const StateDictOptions& options);
// Returns group_of() when options.broadcast_from_rank0 is set, else null. Error kConfig when there is no group; its
// message begins with `where`.
std::shared_ptr<comm::Group> broadcasting_group(const ModelTensorNames& model, const StateDictOptions& options,
                                                const char* where);
// Returns the device of the model's local tensors. Tensors that are loaded into the model are sent between the ranks on
// this device. Error kShape when the local tensors are on several devices; its message begins with `complaint`.
c10::Device device_of(const ModelTensorNames& model, const comm::Group* group, std::string_view complaint);
// Checks that the options fit together. Errors kConfig: broadcast_from_rank0 without full_state_dict, and
// keep_submodule_prefixes = false without exactly one submodule.
void check_options(const StateDictOptions& options);
// Applies the options full_state_dict and cpu_offload to a dict. With full_state_dict this function calls
// gather_state_dict(), and with both options also group_of(); it is COLLECTIVE where these functions are.
StateDict gather_or_offload(const StateDict& state_dict, const ModelTensorNames& model,
                            const StateDictOptions& options);

}  // namespace tessera
