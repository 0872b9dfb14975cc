// The rules of HACKING.md about the structure of the source tree, as functions of the tree's files. A test can
// therefore pass a tree that breaks each rule.
#pragma once

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace tessera::testing {

// The text of files by their path from the root of the tree, such as "tessera/base/error.h".
using SourceTree = std::map<std::string, std::string>;

std::vector<std::string> lines_of(const std::string& text);
// The matches of a regular expression in a text, or one group of each.
std::vector<std::string> matches(const std::string& text, const char* pattern, size_t group = 0);

// The files below `folder` of the source tree whose names end with one of `endings`.
SourceTree read_tree(const std::filesystem::path& root, const std::vector<std::string>& folders,
                     const std::vector<std::string>& endings);

// The layers whose headers each layer may include, with the layer itself: the layers in the tessera_layer(NAME USES
// ...) of a CMakeLists.txt, and the layers that these layers use.
std::map<std::string, std::set<std::string>> layers_of(const std::string& cmake_lists);

// Each function returns one line for each fault: the file, the fault, and the broken rule.

// A file of a layer includes headers of a layer that CMake does not give to this layer, or one of the public headers
// tessera/*.h.
std::vector<std::string> layer_faults(const SourceTree& tree,
                                      const std::map<std::string, std::set<std::string>>& layers);
// Rooms (folders of a layer; detail/ belongs to the room around it) include each other in a circle.
std::vector<std::string> room_faults(const SourceTree& tree);
// A header of a detail/ folder is included from outside the folder that contains this detail/.
std::vector<std::string> detail_faults(const SourceTree& tree);
// A namespace `detail` in a file outside a detail/ folder; a file of a detail/ folder without this namespace; or the
// namespace of another layer than the file's.
std::vector<std::string> namespace_faults(const SourceTree& tree);
// A file outside tessera/ (an example, a user's program) includes another header of ours than tessera/*.h.
std::vector<std::string> public_header_faults(const SourceTree& tree);
// The body of an `if`, `else`, `for` or `while` stands on its own line without braces; or the body has braces, although
// it is one statement that fits on the line.
std::vector<std::string> brace_faults(const SourceTree& tree);

// The functions of namespace std without a version, from the output of `nm --dynamic --undefined-only --demangle`.
std::vector<std::string> unversioned_std(const std::string& nm_output);

}  // namespace tessera::testing
