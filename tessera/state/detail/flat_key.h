// Taking keys of flat optimizer dicts apart.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tessera::detail {

// "state.layers.0.weight.exp_avg" into section, parameter and what of it. Names of parameters have dots, and so may
// names of states, so that only the known names tell them apart.
class FlatKeyReader {
 public:
  explicit FlatKeyReader(const std::vector<std::string>& parameters);

  struct Parts {
    bool is_state = false;  // else of param_groups
    size_t parameter = 0;   // position in those given
    std::string_view rest;  // "exp_avg", within the key
  };
  // False for a key of another parameter. Time is linear in the length of the key.
  bool read(std::string_view key, Parts& parts);

  int64_t lookups() const { return lookups_; }  // of candidate names so far

 private:
  std::unordered_map<std::string_view, size_t> parameters_;  // of the vector given
  int64_t lookups_ = 0;
};

}  // namespace tessera::detail
