#include "tessera/dtensor/debug/comm_debug.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

namespace tessera {

namespace {

thread_local std::vector<std::string> modules;

void add(CommTally& tally, CommKind kind, int64_t bytes) {
  ++tally.counts[static_cast<int>(kind)];
  tally.bytes[static_cast<int>(kind)] += bytes;
}

void add_lines(const std::string& name, const CommTally& tally, std::string& text) {
  text += fmt::format("{}: {} collectives, {} bytes\n", name, tally.total(), tally.total_bytes());
  for (int kind = 0; kind < comm::kOpCount; ++kind) {
    if (tally.counts[kind] > 0) {
      text += fmt::format("  {}: {}, {} bytes\n", comm::to_string(static_cast<CommKind>(kind)), tally.counts[kind],
                          tally.bytes[kind]);
    }
  }
}

}  // namespace

int64_t CommTally::total() const { return std::accumulate(std::begin(counts), std::end(counts), int64_t{0}); }

int64_t CommTally::total_bytes() const { return std::accumulate(std::begin(bytes), std::end(bytes), int64_t{0}); }

void CommDebugMode::on_collective(CommKind kind, int64_t bytes, const comm::Group&) {
  std::lock_guard lock(mutex_);
  add(all_, kind, bytes);
  for (const auto& name : std::set<std::string>(modules.begin(), modules.end())) {
    add(by_module_[name], kind, bytes);
  }
}

std::string CommDebugMode::table() const {
  std::string text;
  add_lines("Global", all_, text);
  for (const auto& [name, tally] : by_module_) {
    add_lines(name, tally, text);
  }
  return text;
}

void CommDebugMode::enter_module(const std::string& name) { modules.push_back(name); }

void CommDebugMode::leave_module(const std::string& name) {
  const auto found = std::find(modules.rbegin(), modules.rend(), name);
  if (found != modules.rend()) {
    modules.erase(found.base() - 1);
  }
}

}  // namespace tessera
