// Expands Slurm's compressed lists of host names and of tasks per node.
#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/text/number.h"
#include "tessera/comm/rendezvous/rendezvous.h"

namespace tessera::comm {
namespace {

constexpr size_t kMaxNodes = 65536;

[[noreturn]] void bad_list(std::string_view list_name, std::string_view list) {
  raise(ErrorKind::kConfig, "[comm.rendezvous] {}: malformed list '{}'", list_name, list.substr(0, 200));
}

int number(std::string_view text, std::string_view list_name, std::string_view list) {
  const auto value = parse_number<int>(text);
  if (!value || *value < 0) bad_list(list_name, list);
  return *value;
}

// Splits at commas outside brackets.
std::vector<std::string_view> split(std::string_view list, std::string_view list_name) {
  std::vector<std::string_view> parts;
  size_t begin = 0;
  bool inside = false;
  for (size_t i = 0; i <= list.size(); ++i) {
    const char c = i < list.size() ? list[i] : ',';
    if (c == '[' || c == ']') {
      if (inside == (c == '[')) bad_list(list_name, list);
      inside = c == '[';
    }
    if (c != ',' || (inside && i < list.size())) continue;
    if (i == begin || inside) bad_list(list_name, list);
    parts.push_back(list.substr(begin, i - begin));
    begin = i + 1;
  }
  return parts;
}

// Expands the first bracket of `name` and recurses for the rest. Digits keep their width ("01" stays two digits). Every
// bracket multiplies the number of names, so brackets, range lengths and the total are bounded.
void expand_name(std::string_view name, const std::string& head, std::string_view list,
                 std::vector<std::string>& names) {
  constexpr std::string_view kListName = "Slurm's node list";
  const size_t open = name.find('[');
  if (open == name.npos) {
    if (names.size() == kMaxNodes) bad_list("Slurm's node list of more than 65536 nodes", list);
    names.push_back(head + std::string(name));
    return;
  }
  const size_t close = name.find(']', open);
  for (const auto range : split(name.substr(open + 1, close - open - 1), kListName)) {
    const size_t dash = range.find('-');
    const std::string_view first = range.substr(0, dash), last = dash == range.npos ? first : range.substr(dash + 1);
    if (first.size() > 9 || last.size() > 9) bad_list(kListName, list);
    const int from = number(first, kListName, list), to = number(last, kListName, list);
    if (to < from || static_cast<size_t>(to - from) >= kMaxNodes) bad_list(kListName, list);
    for (int i = from; i <= to; ++i) {
      const std::string digits = fmt::format("{:0{}}", i, first.size());
      expand_name(name.substr(close + 1), head + std::string(name.substr(0, open)) + digits, list, names);
    }
  }
}

}  // namespace

std::vector<std::string> expand_node_list(std::string_view list) {
  std::vector<std::string> names;
  for (const auto name : split(list, "Slurm's node list")) {
    if (std::ranges::count(name, '[') > 4) bad_list("Slurm's node list", list);
    expand_name(name, "", list, names);
  }
  return names;
}

std::vector<int> expand_tasks_per_node(std::string_view list) {
  constexpr std::string_view kListName = "Slurm's tasks per node";
  std::vector<int> tasks;
  for (auto part : split(list, kListName)) {
    size_t times = 1;
    if (const size_t open = part.find("(x"); open != part.npos) {
      if (part.back() != ')') bad_list(kListName, list);
      times = static_cast<size_t>(number(part.substr(open + 2, part.size() - open - 3), kListName, list));
      part = part.substr(0, open);
    }
    if (times == 0 || tasks.size() + times > kMaxNodes) bad_list(kListName, list);
    tasks.insert(tasks.end(), times, number(part, kListName, list));
  }
  return tasks;
}

}  // namespace tessera::comm
