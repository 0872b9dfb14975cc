// The classes and functions whose names a pickle may hold: data of torch.save and DCP. No others are read or written.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

// The name as it is spelled today, for the spellings of other Python versions: "builtins.set" for ("__builtin__",
// "set"), "pathlib.PosixPath" for ("pathlib._local", "PosixPath").
struct PickleName {
  std::string module;
  std::string name;
};
PickleName canonical_pickle_name(std::string_view module, std::string_view name);

// Whether a canonical name is in the list.
bool is_known_pickle_name(const PickleName& name);

}  // namespace tessera
