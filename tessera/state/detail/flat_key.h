// Taking keys of flat optimizer dicts apart.
//
//   FlatKeyReader reader(parameter_names);
//   const auto key = reader.read("state.layers.0.weight.exp_avg");   // parameter 0, rest "exp_avg"
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tessera::detail {

struct FlatKey {
  bool is_state = false;  // else of param_groups
  size_t parameter = 0;   // its position
  std::string_view rest;  // "exp_avg", within the key
};

// Names of parameters have dots, and so may names of states, so that only the known names tell them apart.
class FlatKeyReader {
 public:
  // The names must outlive it. Error kShape for a name that is there twice.
  explicit FlatKeyReader(const std::vector<std::string>& parameters);
  // Nothing for a key of another parameter. Time is linear in the length of the key.
  std::optional<FlatKey> read(std::string_view key);
  int64_t lookups() const { return lookups_; }  // of candidate names so far

 private:
  std::unordered_map<std::string_view, size_t> parameters_;
  int64_t lookups_ = 0;
};

}  // namespace tessera::detail
