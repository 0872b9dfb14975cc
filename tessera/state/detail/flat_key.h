// Splits a key of a flat optimizer dict into the index of a parameter and the rest of the key.
//
//   FlatKeyReader reader(parameter_names);
//   const auto key = reader.read("state.layers.0.weight.exp_avg");   // parameter 0, rest_of_key "exp_avg"
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tessera::detail {

struct FlatKey {
  bool is_state = false;         // true for a key of `state`, false for a key of `param_groups`
  size_t parameter = 0;          // position of the parameter in the names
  std::string_view rest_of_key;  // what follows the name of the parameter, such as "exp_avg"; a view into the key
};

// Names of parameters contain dots, and names of states may contain dots too. Only the list of known names shows where
// the name of the parameter ends.
class FlatKeyReader {
 public:
  // Keeps views of the names, which must outlive the reader. Error kShape for a name that occurs twice.
  explicit FlatKeyReader(const std::vector<std::string>& parameters);
  // Splits `key` into the fields of FlatKey. Returns nullopt if the key does not begin with "state." or
  // "param_groups.", or if no known parameter name follows. The time is linear in the length of the key.
  std::optional<FlatKey> read(std::string_view key);
  int64_t lookups() const { return lookups_; }  // candidate names that were looked up so far

 private:
  std::unordered_map<std::string_view, size_t> parameters_;
  int64_t lookups_ = 0;
};

}  // namespace tessera::detail
