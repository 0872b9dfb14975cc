// The checks of the rules of HACKING.md about the structure of the source tree (source_tree.h).
#include "tests/tree/source_tree.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <regex>
#include <sstream>

#include "tessera/base/files/file.h"

namespace tessera::testing {
namespace {

struct Include {
  std::string from, to;
};

std::vector<Include> includes_of(const SourceTree& tree) {
  static const std::regex line(R"re((?:^|\n)#include ["<](tessera/[^">]+)[">])re");
  std::vector<Include> out;
  for (const auto& [path, text] : tree) {
    for (std::sregex_iterator each(text.begin(), text.end(), line), end; each != end; ++each) {
      out.push_back({path, (*each)[1]});
    }
  }
  return out;
}

std::string parent_of(const std::string& path) { return path.substr(0, path.rfind('/')); }

// "tessera/comm/shm/engine.cc" gives "comm". A public header, such as tessera/comm.h, has no layer.
std::string layer_of(const std::string& path) {
  const auto begin = std::string("tessera/").size();
  const auto end = path.find('/', begin);
  return path.starts_with("tessera/") && end != path.npos ? path.substr(begin, end - begin) : "";
}

std::string room_of(const std::string& path) {
  const auto folder = parent_of(path);
  return folder.ends_with("/detail") ? parent_of(folder) : folder;
}

std::string namespace_of_layer(const std::string& layer) {
  static const std::set<std::string> own = {"text", "comm",  "kernels", "nn",    "optim",
                                            "data", "train", "report",  "serve", "cli"};
  return own.contains(layer) ? "tessera::" + layer : "tessera";
}

}  // namespace

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::vector<std::string> matches(const std::string& text, const char* pattern, size_t group) {
  const std::regex regex(pattern);
  std::vector<std::string> found;
  for (std::sregex_iterator each(text.begin(), text.end(), regex), end; each != end; ++each) {
    found.push_back((*each)[group]);
  }
  return found;
}

SourceTree read_tree(const std::filesystem::path& root, const std::vector<std::string>& folders,
                     const std::vector<std::string>& endings) {
  SourceTree tree;
  for (const auto& folder : folders) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root / folder)) {
      const auto path = entry.path().lexically_relative(root).string();
      if (std::ranges::none_of(endings, [&](const auto& ending) { return path.ends_with(ending); })) continue;
      tree[path] = read_file(entry.path());
    }
  }
  return tree;
}

std::map<std::string, std::set<std::string>> layers_of(const std::string& cmake_lists) {
  static const std::regex call(R"re(tessera_layer\((\w+)([^)]*)\))re");
  std::map<std::string, std::set<std::string>> out;
  for (std::sregex_iterator each(cmake_lists.begin(), cmake_lists.end(), call), end; each != end; ++each) {
    auto& used = out[(*each)[1]];
    used.insert((*each)[1]);
    std::istringstream words((*each)[2]);
    bool is_layer = false;
    for (std::string word; words >> word;) {
      if (word == "USES" || word == "LIBRARIES") {
        is_layer = word == "USES";
      } else if (is_layer) {
        const auto& below = out.at(word);  // CMake names a layer after the layers that it uses
        used.insert(below.begin(), below.end());
      }
    }
  }
  return out;
}

std::vector<std::string> layer_faults(const SourceTree& tree,
                                      const std::map<std::string, std::set<std::string>>& layers) {
  std::vector<std::string> faults;
  for (const auto& [from, to] : includes_of(tree)) {
    const auto layer = layer_of(from), included = layer_of(to);
    if (layer.empty()) continue;
    if (included.empty()) {
      faults.push_back(fmt::format("{} includes {}: public headers are for users of the library", from, to));
    } else if (!layers.contains(layer) || !layers.at(layer).contains(included)) {
      faults.push_back(fmt::format("{} includes {}: layer {} does not use layer {}", from, to, layer, included));
    }
  }
  return faults;
}

std::vector<std::string> room_faults(const SourceTree& tree) {
  std::map<std::string, std::map<std::string, Include>> rooms;
  for (const auto& include : includes_of(tree)) {
    const auto from = room_of(include.from), to = room_of(include.to);
    if (from != to && layer_of(include.from) == layer_of(include.to)) rooms[from].emplace(to, include);
  }
  std::vector<std::string> faults, path;
  std::set<std::string> done;
  const std::function<void(const std::string&)> visit = [&](const std::string& room) {
    const auto begin = std::ranges::find(path, room);
    if (begin != path.end()) {
      std::string circle;
      for (auto each = begin; each != path.end(); ++each) {
        const auto& next = each + 1 == path.end() ? *begin : *(each + 1);
        const auto& include = rooms.at(*each).at(next);
        circle += fmt::format("\n  {} includes {}", include.from, include.to);
      }
      faults.push_back("rooms include each other in a circle:" + circle);
      return;
    }
    if (done.contains(room)) return;
    path.push_back(room);
    for (const auto& [next, include] : rooms[room]) visit(next);
    path.pop_back();
    done.insert(room);
  };
  std::vector<std::string> all;
  for (const auto& [room, uses] : rooms) all.push_back(room);
  for (const auto& room : all) visit(room);
  return faults;
}

std::vector<std::string> detail_faults(const SourceTree& tree) {
  std::vector<std::string> faults;
  for (const auto& [from, to] : includes_of(tree)) {
    const auto at = to.find("/detail/");
    if (at == to.npos || from.starts_with(to.substr(0, at + 1))) continue;
    faults.push_back(fmt::format("{} includes {}, which is for {} alone", from, to, to.substr(0, at)));
  }
  return faults;
}

std::vector<std::string> namespace_faults(const SourceTree& tree) {
  static const std::regex opened(R"re((?:^|\n)namespace (tessera[\w:]*) \{)re");
  std::vector<std::string> faults;
  for (const auto& [path, text] : tree) {
    const auto layer = layer_of(path);
    if (layer.empty()) continue;
    const bool in_detail = path.find("/detail/") != path.npos;
    bool is_named = false, has_detail = false;
    std::string found;
    for (std::sregex_iterator each(text.begin(), text.end(), opened), end; each != end; ++each) {
      const std::string name = (*each)[1];
      found += found.empty() ? name : ", " + name;
      has_detail = has_detail || name.ends_with("::detail");
      is_named = is_named || name == namespace_of_layer(layer) || name.starts_with(namespace_of_layer(layer) + "::");
    }
    if (found.empty()) continue;  // a file with only macros or C
    const auto wanted = namespace_of_layer(layer) + (in_detail ? "::detail" : "");
    if (!is_named || has_detail != in_detail) {
      faults.push_back(fmt::format("{} opens {}, expected {}", path, found, wanted));
    }
  }
  return faults;
}

std::vector<std::string> public_header_faults(const SourceTree& tree) {
  std::vector<std::string> faults;
  for (const auto& [from, to] : includes_of(tree)) {
    if (from.starts_with("tessera/") || layer_of(to).empty()) continue;
    faults.push_back(fmt::format("{} includes {}, which may move; the public headers are tessera/*.h", from, to));
  }
  return faults;
}

std::vector<std::string> brace_faults(const SourceTree& tree) {
  static const std::regex head(R"re(^( *)((\} )?(else )?(if|for|while) .*\)|(\} )?else)( \{)?$)re");
  std::vector<std::string> faults;
  for (const auto& [path, text] : tree) {
    const auto lines = lines_of(text);
    for (size_t i = 0; i + 2 < lines.size(); ++i) {
      std::smatch match;
      if (!std::regex_match(lines[i], match, head) || lines[i].find("//") != std::string::npos) continue;
      if (std::ranges::count(lines[i], '(') != std::ranges::count(lines[i], ')')) continue;  // its last line
      const std::string indent = match[1];
      const auto& body = lines[i + 1];
      const bool is_inside = body.starts_with(indent + "  ") && !body.starts_with(indent + "    ");
      if (!is_inside) continue;
      if (!match[7].matched) {
        faults.push_back(fmt::format("{}:{}: a body on a line of its own needs braces", path, i + 1));
        continue;
      }
      const auto& after = lines[i + 2];
      const auto joined = lines[i].size() - 2 + body.size() - indent.size() - 1;
      // GoogleTest's macros contain an else.
      static const std::regex simple(R"re(^ *(?!(if|for|while|do|switch|case)\b|[A-Z_]+\b)[^{}\[\]/ ][^{}\[\]/]*;$)re");
      if (match[3].matched || match[4].matched || match[6].matched || after != indent + "}" || joined > 120) continue;
      if (!std::regex_match(body, simple)) continue;
      if (std::ranges::count(body, '(') != std::ranges::count(body, ')')) continue;
      faults.push_back(fmt::format("{}:{}: a statement that fits on the line needs no braces", path, i + 1));
    }
  }
  return faults;
}

std::vector<std::string> unversioned_std(const std::string& nm_output) {
  std::vector<std::string> out;
  for (const auto& line : lines_of(nm_output)) {
    const auto name = line.find("U ") == line.npos ? std::string() : line.substr(line.find("U ") + 2);
    if (name.starts_with("std::") && name.find("@GLIBCXX_") == name.npos && name.find("@CXXABI_") == name.npos) {
      out.push_back(name);
    }
  }
  return out;
}

}  // namespace tessera::testing
