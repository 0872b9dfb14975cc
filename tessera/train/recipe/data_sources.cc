#include "tessera/train/recipe/data_sources.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/base/text/number.h"
#include "tessera/base/text/quote.h"
#include "tessera/train/recipe/recipe_value.h"

namespace tessera::train {
namespace {

using NodeKind = YamlNode::Kind;

const std::string& text_value(const std::string& name, const YamlNode& value, const std::string& where) {
  const bool printable = std::ranges::none_of(value.text, [](unsigned char c) { return c < 0x20; });
  TESSERA_CHECK(value.kind == NodeKind::kScalar && !value.text.empty() && printable, ErrorKind::kConfig,
                "[train.recipe] {}: {} of a data source: wanted text on one line.", where, quote(name));
  return value.text;
}

double weight_value(const YamlNode& value, const std::string& where) {
  const auto& text = text_value("weight", value, where);
  const auto weight = parse_number<double>(text);
  TESSERA_CHECK(weight && std::isfinite(*weight) && *weight > 0 && *weight <= 1e12, ErrorKind::kConfig,
                "[train.recipe] {}: weight of a data source: found {}, wanted a number above 0.", where, quote(text));
  return *weight;
}

const std::string& format_of_source(const YamlNode& value, const std::string& where) {
  const auto& text = text_value("format", value, where);
  TESSERA_CHECK(std::find(std::begin(data::kFormats), std::end(data::kFormats), text) != std::end(data::kFormats),
                ErrorKind::kConfig,
                "[train.recipe] {}: format of a data source: found {}, wanted a value of data.format.", where,
                quote(text));
  return text;
}

data::DataSource source_of(const YamlNode& mapping, const std::string& where) {
  data::DataSource source("");
  for (const auto& [name, value] : mapping.entries) {
    if (name == "path") {
      source.path = text_value(name, value, where);
    } else if (name == "weight") {
      source.weight = weight_value(value, where);
    } else if (name == "format") {
      source.format = format_of_source(value, where);
    } else if (name == "split") {
      source.split = text_value(name, value, where);
    } else if (name == "columns" && value.kind == NodeKind::kMapping) {
      for (const auto& [ours, theirs] : value.entries) source.columns[ours] = text_value(ours, theirs, where);
    } else {
      raise(ErrorKind::kConfig,
            "[train.recipe] {}: a data source: found {}, wanted path, weight, format, columns (a mapping) and split.",
            where, quote(name));
    }
  }
  TESSERA_CHECK(!source.path.empty(), ErrorKind::kConfig, "[train.recipe] {}: a data source has no path.", where);
  return source;
}

// Writes the keys in a fixed order and leaves out defaults, so that equal sources have equal text: recipes are compared
// as text, between ranks and when a run resumes.
std::string text_of_source(const data::DataSource& source) {
  std::string text = "{path: " + format_text(source.path);
  if (source.weight > 0) text += fmt::format(", weight: {}", source.weight);
  if (source.format != "auto") text += ", format: " + source.format;
  if (!source.split.empty()) text += ", split: " + format_text(source.split);
  if (!source.columns.empty()) {
    std::string columns;
    for (const auto& [ours, theirs] : source.columns) {
      columns += (columns.empty() ? "" : ", ") + format_text(ours) + ": " + format_text(theirs);
    }
    text += ", columns: {" + columns + "}";
  }
  return text + "}";
}

}  // namespace

std::string source_text(const YamlNode& mapping, const std::string& where) {
  return text_of_source(source_of(mapping, where));
}

bool is_source_mapping(const std::string& item) { return item.starts_with("{path: "); }

data::DataSource parse_source(const std::string& item) {
  if (!is_source_mapping(item)) return data::DataSource(item);
  const auto node = parse_yaml(item, "a data source");
  return source_of(node, "a data source");
}

std::string with_path(const std::string& item, const std::string& path) {
  if (!is_source_mapping(item)) return path;
  auto source = parse_source(item);
  source.path = path;
  return text_of_source(source);
}

std::map<std::string, std::string> parse_columns(const std::vector<std::string>& items) {
  std::map<std::string, std::string> columns;
  for (const auto& item : items) {
    const size_t equals = item.find('=');
    // An item is "OURS=THEIRS", either written so by the user or made from an entry of a mapping. OURS is the column
    // name that this library expects, THEIRS the column's name in the data. emplace() fails if an earlier item has the
    // same OURS.
    const bool good = equals != item.npos && equals > 0 && equals + 1 < item.size() &&
                      columns.emplace(item.substr(0, equals), item.substr(equals + 1)).second;
    TESSERA_CHECK(good, ErrorKind::kConfig,
                  "[train.recipe] data.columns: found {}, wanted {{OURS: THEIRS}} with each of our names once.",
                  quote(item));
  }
  return columns;
}

}  // namespace tessera::train
