// The tensors of a model by the names that state dicts have for them. No communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tessera/nn/module.h"
#include "tessera/state/state_dict.h"

namespace tessera {

// Without the prefixes of PyTorch's wrappers.
std::string clean_fqn(const std::string& name);
// The values of a dict by these names. Error kShape, which begins with `where`, for two values of one name.
using ValuesByName = std::unordered_map<std::string, const StateValue*>;
ValuesByName values_by_clean_fqn(const StateDict& state_dict, const char* where);
// Names in a message, in quotes: the first 20, and how many more there are.
std::string quoted_list(const std::vector<std::string>& names);

class ModelNames {
 public:
  struct Entry {
    std::vector<std::string> names;          // all of them, in the order of the modules
    nn::ParameterSlot* parameter = nullptr;  // else a buffer
    at::Tensor* buffer = nullptr;
    const at::Tensor& tensor() const { return parameter ? parameter->parameter : *buffer; }
  };
  // Error kConfig when options.fqn_modifier gives two tensors one name.
  ModelNames(nn::Module& model, const StateDictOptions& options);

  // Each parameter and persistent buffer once.
  const std::vector<Entry>& entries() const { return entries_; }
  // Every name with its entry, in the order of the modules.
  const std::vector<std::pair<std::string, size_t>>& names() const { return names_; }
  // nullptr when it is none of the model's.
  const Entry* find(const at::Tensor& parameter) const;

 private:
  void visit(nn::Module& module, const std::string& prefix, const StateDictOptions& options);
  void add(const std::string& fqn, const Entry& entry, const StateDictOptions& options);
  std::vector<Entry> entries_;
  std::vector<std::pair<std::string, size_t>> names_;
  std::unordered_map<const c10::TensorImpl*, size_t> by_tensor_;
};

// The ranks of options.group, or of the world of the first DTensor; null when there is none. COLLECTIVE over all ranks
// when they had no group yet.
std::shared_ptr<comm::Group> group_of(const ModelNames& model, const StateDictOptions& options);
// The same group when rank 0's dict counts, else null. Error kConfig, which begins with `where`, when there is none.
std::shared_ptr<comm::Group> broadcasting_group(const ModelNames& model, const StateDictOptions& options,
                                                const char* where);
// On which tensors for the model travel: that of its local parts. Error kShape, which begins with `complaint`, when
// they are on several.
c10::Device device_of(const ModelNames& model, const comm::Group* group, std::string_view complaint);
// Errors kConfig: broadcast_from_rank0 without full_state_dict.
void check_options(const StateDictOptions& options);
// full_state_dict and cpu_offload of a dict. COLLECTIVE as gather_state_dict and group_of.
StateDict full_or_on_cpu(const StateDict& state_dict, const ModelNames& model, const StateDictOptions& options);

}  // namespace tessera
