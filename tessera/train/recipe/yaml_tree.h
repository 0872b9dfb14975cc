// YAML text to a small tree with line numbers, safe on hostile input. The tree is built from yaml-cpp's events, so
// that limits hold before anything grows: 1 MB of text, 16 levels, 100,000 nodes with every alias counted as the
// copy it stands for (no "billion laughs"), no key twice in a mapping, one document, no tags.
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
  std::string text = {};  // of a scalar
  bool quoted = false;    // "5" is text, 5 a number
  int line = 0;           // from 1
  std::vector<YamlNode> items = {};
  std::vector<std::pair<std::string, YamlNode>> entries = {};  // in file order
};

// `source` names the text in errors. Empty text is a null node.
YamlNode parse_yaml(std::string_view text, const std::string& source);

}  // namespace tessera::train
