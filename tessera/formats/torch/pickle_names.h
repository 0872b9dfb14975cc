// The list of classes and functions whose names a pickle may hold: those of torch.save and DCP data. Other names are
// neither read nor written.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

// A class or function name in its current spelling. Spellings of other Python versions are converted: ("__builtin__",
// "set") to "builtins.set", ("pathlib._local", "PosixPath") to "pathlib.PosixPath".
struct PickleName {
  std::string module;
  std::string name;
};
PickleName canonical_pickle_name(std::string_view module, std::string_view name);

// Whether a canonical name is in the list of allowed names.
bool is_known_pickle_name(const PickleName& name);

}  // namespace tessera
