// data.train and data.validation of a recipe: paths, or mappings with more to say.
//
//   data:
//     train:
//       - dialogues.jsonl
//       - {path: web/*.parquet, weight: 3, columns: {text: content}, split: train}
//
// A recipe keeps an item as text: a path, or the mapping in one line that begins with "{path: ". Pure, thread-safe.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tessera/data/records/data_source.h"
#include "tessera/train/recipe/yaml_tree.h"

namespace tessera::train {

// The one line of a mapping; `where` begins messages. Error kConfig: no path, a key that there is not, a value of
// another type, a weight that is not above 0, a format that there is not.
std::string source_text(const YamlNode& mapping, const std::string& where);
bool is_source_mapping(const std::string& item);

// What an item says. Error kConfig as source_text, for text that was not made by it.
data::DataSource parse_source(const std::string& item);
// The same item with its path replaced.
std::string with_path(const std::string& item, const std::string& path);

// data.columns: items "ours=theirs". Error kConfig for others, and for a name that is there twice.
std::map<std::string, std::string> parse_columns(const std::vector<std::string>& items);

}  // namespace tessera::train
