// The items of data.train and data.validation in a recipe: paths, or mappings of a path and its options.
//
//   data:
//     train:
//       - dialogues.jsonl
//       - {path: web/*.parquet, weight: 3, columns: {text: content}, split: train}
//
// A recipe stores each item as text: a path, or the mapping as one line of YAML that begins with "{path: ". Pure,
// thread-safe.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tessera/data/records/data_source.h"
#include "tessera/train/recipe/yaml_tree.h"

namespace tessera::train {

// Checks the YAML mapping of a data source and returns it as one line of text, which parse_source() reads. Error
// messages begin with `where`. Error kConfig: a mapping without path, an unknown key, a value of the wrong type, a
// weight that is not above 0, an unknown format.
std::string source_text(const YamlNode& mapping, const std::string& where);
// Whether `item`, an item of a list of data sources, is a mapping in the form that source_text() returns. Otherwise the
// item is a path.
bool is_source_mapping(const std::string& item);

// Parses `item`, an item of data.train or data.validation: a path, or a mapping in the form that source_text() returns.
// Error kConfig if the text of a mapping has a mistake; a text that source_text() returned has none.
data::DataSource parse_source(const std::string& item);
// Returns `item` with its path replaced by `path`; the options of the item are kept.
std::string with_path(const std::string& item, const std::string& path);

// The items "OURS=THEIRS" of data.columns as a map from our name to the name in the files. Error kConfig for an item of
// another form, and for a name of ours that occurs twice.
std::map<std::string, std::string> parse_columns(const std::vector<std::string>& items);

}  // namespace tessera::train
