#include "tests/conformance/op_table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fnmatch.h>

#include <fstream>
#include <sstream>
#include <stdexcept>

#include "tests/support/process.h"

namespace tessera::testing {

namespace {

std::string trimmed(const std::string& text) {
  const auto first = text.find_first_not_of(' ');
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(' ') - first + 1);
}

const char* name_of(DifferenceKind kind) {
  switch (kind) {
    case DifferenceKind::kFewer:
      return "fewer";
    case DifferenceKind::kElsewhere:
      return "elsewhere";
    case DifferenceKind::kPlacement:
      return "placement";
    case DifferenceKind::kMore:
      return "more";
    default:
      return "refuses";
  }
}

}  // namespace

std::string Behaviour::to_string() const {
  return error ? "error" : wrong ? "wrong" : fmt::format("{} {}", fmt::join(outputs, " "), bytes);
}

Behaviour parse_behaviour(const std::string& text) {
  Behaviour behaviour;
  behaviour.error = text == "error";
  behaviour.wrong = text == "wrong";
  if (behaviour.error || behaviour.wrong) return behaviour;
  std::istringstream words(text);
  for (std::string word; words >> word;) behaviour.outputs.push_back(word);
  behaviour.bytes = std::stoll(behaviour.outputs.back());
  behaviour.outputs.pop_back();
  return behaviour;
}

OpTable read_op_table(const std::string& name) {
  OpTable table;
  std::ifstream file(source_folder() / "tests/conformance" / name);
  std::vector<std::string> ops;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    if (line.starts_with("ops ")) {
      std::istringstream words(line.substr(4));
      ops.clear();
      for (std::string op; words >> op;) {
        ops.push_back(op);
        table[op];
      }
      continue;
    }
    const auto arrow = line.find("->");
    if (arrow == std::string::npos) throw std::runtime_error(name + ": no arrow in: " + line);
    for (const auto& op : ops) {
      table[op][trimmed(line.substr(0, arrow))] = parse_behaviour(trimmed(line.substr(arrow + 2)));
    }
  }
  return table;
}

std::string to_text(const OpTable& table) {
  std::map<std::string, std::string> blocks;
  std::vector<const std::string*> order;  // keys, sorted by the first operation of each
  for (const auto& [op, rows] : table) {
    std::string lines;
    for (const auto& [inputs, behaviour] : rows) lines += inputs + " -> " + behaviour.to_string() + "\n";
    const auto [block, is_new] = blocks.try_emplace(lines, "ops");
    block->second += " " + op;
    if (is_new) order.push_back(&block->first);
  }
  std::string text;
  for (const auto* lines : order) text += "\n" + blocks.at(*lines) + "\n" + *lines;
  return text;
}

bool is_ours(const Behaviour& theirs, const Behaviour& ours) {
  return theirs.error || theirs.wrong || difference(theirs, ours) == DifferenceKind::kElsewhere;
}

std::optional<DifferenceKind> difference(const Behaviour& theirs, const Behaviour& ours) {
  if (theirs.error || theirs.wrong) return std::nullopt;
  if (ours.error) return DifferenceKind::kRefuses;
  if (ours.bytes > theirs.bytes) return DifferenceKind::kMore;
  if (ours.bytes < theirs.bytes) {
    return ours.outputs == theirs.outputs ? DifferenceKind::kFewer : DifferenceKind::kElsewhere;
  }
  return ours.outputs == theirs.outputs ? std::nullopt : std::optional(DifferenceKind::kPlacement);
}

ListedDifferences::ListedDifferences() {
  std::ifstream file(source_folder() / "tests/conformance/op_differences.txt");
  for (std::string text; std::getline(file, text);) {
    if (text.empty() || text[0] == '#') continue;
    std::istringstream fields(text);
    Line line{.text = text, .kind = {}, .op = {}, .inputs = {}};
    std::string allowed, reason;
    for (std::string* field : {&line.kind, &line.op, &line.inputs, &allowed, &reason}) {
      std::getline(fields, *field, '|');
      *field = trimmed(*field);
      if (field->empty()) {
        throw std::runtime_error(
            "op_differences.txt: wanted 'kind | operations | placements | combinations | reason', found: " + text);
      }
    }
    line.allowed = std::stoll(allowed);
    lines_.push_back(std::move(line));
  }
}

bool ListedDifferences::allows(DifferenceKind kind, const std::string& op, const std::string& inputs) {
  bool allowed = false;
  for (auto& line : lines_) {
    if (line.kind == name_of(kind) && fnmatch(line.op.c_str(), op.c_str(), 0) == 0 &&
        fnmatch(line.inputs.c_str(), inputs.c_str(), 0) == 0) {
      ++line.used;
      allowed = true;
    }
  }
  return allowed;
}

std::vector<std::string> ListedDifferences::miscounted() const {
  std::vector<std::string> texts;
  for (const auto& line : lines_) {
    if (line.used != line.allowed) texts.push_back(fmt::format("{} (found {})", line.text, line.used));
  }
  return texts;
}

}  // namespace tessera::testing
