// The rules of HACKING.md about how the source tree hangs together, as functions of its files, so that a test can show
// a tree that breaks each of them.
#pragma once

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace tessera::testing {

// The text of files by their path from the root of the tree, as "tessera/base/error.h".
using SourceTree = std::map<std::string, std::string>;

// The files below `folder` of the source tree whose names end with one of `endings`.
SourceTree read_tree(const std::filesystem::path& root, const std::vector<std::string>& folders,
                     const std::vector<std::string>& endings);

// The layers that each layer may include headers of, itself among them: what the tessera_layer(NAME USES ...) of a
// CMakeLists.txt names, and what those layers use in turn.
std::map<std::string, std::set<std::string>> layers_of(const std::string& cmake_lists);

// Each function returns one line for each fault: the file, what it does, and the rule that it breaks.

// A file of a layer includes headers of a layer that CMake does not give it, or one of the public headers tessera/*.h.
std::vector<std::string> layer_faults(const SourceTree& tree,
                                      const std::map<std::string, std::set<std::string>>& layers);
// Rooms (folders of a layer; detail/ belongs to the room around it) that include each other in a circle.
std::vector<std::string> room_faults(const SourceTree& tree);
// A header of a detail/ folder that is included from outside the folder which holds it.
std::vector<std::string> detail_faults(const SourceTree& tree);
// A namespace `detail` in a file that lies in no detail/ folder, or a file of a detail/ folder without it; a namespace
// of another layer than the file's.
std::vector<std::string> namespace_faults(const SourceTree& tree);
// A file outside tessera/ (an example, a program of a user) that includes another header of ours than tessera/*.h.
std::vector<std::string> door_faults(const SourceTree& tree);
// `if`, `else`, `for` and `while` whose body stands on a line of its own without braces, or in braces although it is
// one statement that fits on the line.
std::vector<std::string> brace_faults(const SourceTree& tree);

// Of the output of `nm --dynamic --undefined-only --demangle`, the functions of namespace std without a version.
std::vector<std::string> unversioned_std(const std::string& nm_output);

}  // namespace tessera::testing
