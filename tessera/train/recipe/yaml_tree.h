// Parses YAML text into a small tree with line numbers, and is safe on hostile input. The tree is built from yaml-cpp's
// events, so that limits are checked before memory grows: 1 MiB of text, 16 levels, 100,000 nodes, where an alias
// counts as a copy of its anchor's nodes (against "billion laughs"). A key twice in a mapping, a second document and
// tags are errors.
//
//   YamlNode root = parse_yaml(text, "my.yaml");
//   for (const auto& [key, value] : root.entries) ...
//
// Pure, thread-safe. Errors are kConfig: "[train.recipe] my.yaml:3: ...".
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::train {

inline constexpr size_t kYamlLimitBytes = 1 << 20;
inline constexpr size_t kYamlLimitNodes = 100000;
inline constexpr size_t kYamlLimitDepth = 16;

struct YamlNode {
  enum class Kind { kNull, kScalar, kSequence, kMapping };
  Kind kind = Kind::kNull;
  std::string text = {};  // for a scalar
  bool quoted = false;    // for a scalar: "5" is text, 5 may be a number
  int line = 0;           // counted from 1
  std::vector<YamlNode> items = {};
  std::vector<std::pair<std::string, YamlNode>> entries = {};  // in file order
};

// Parses one document. `source` names the text in errors. Empty text gives a kNull node.
YamlNode parse_yaml(std::string_view text, const std::string& source);

}  // namespace tessera::train
