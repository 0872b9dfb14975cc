#include "tessera/dtensor/debug/comm_debug.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <vector>

namespace tessera {

namespace {

// The names that enter_module() added on this thread and leave_module() has not yet removed, oldest first. A module
// that calls itself has several entries.
thread_local std::vector<std::string> modules;

void add(CommCounts& counts, CommKind kind, int64_t bytes) {
  ++counts.counts[static_cast<int>(kind)];
  counts.bytes[static_cast<int>(kind)] += bytes;
}

nlohmann::ordered_json json_of(const CommCounts& counts) {
  auto all = nlohmann::ordered_json::object();
  for (int kind = 0; kind < comm::kOpCount; ++kind) {
    if (counts.counts[kind] > 0) {
      all[comm::to_string(static_cast<CommKind>(kind))] = {{"count", counts.counts[kind]},
                                                           {"bytes", counts.bytes[kind]}};
    }
  }
  return all;
}

}  // namespace

int64_t CommCounts::total() const { return std::accumulate(std::begin(counts), std::end(counts), int64_t{0}); }

int64_t CommCounts::total_bytes() const { return std::accumulate(std::begin(bytes), std::end(bytes), int64_t{0}); }

CommCounts& CommCounts::operator+=(const CommCounts& other) {
  for (int kind = 0; kind < comm::kOpCount; ++kind) {
    counts[kind] += other.counts[kind];
    bytes[kind] += other.bytes[kind];
  }
  return *this;
}

std::string CommCounts::table(const std::string& name) const {
  std::string text = fmt::format("{}: {} collectives, {} bytes\n", name, total(), total_bytes());
  for (int kind = 0; kind < comm::kOpCount; ++kind) {
    if (counts[kind] > 0) {
      text +=
          fmt::format("  {}: {}, {} bytes\n", comm::to_string(static_cast<CommKind>(kind)), counts[kind], bytes[kind]);
    }
  }
  return text;
}

// The mutex is needed because autograd's threads call this function for the collectives of a backward. `modules` is a
// thread-local list. A collective is counted once for each module name, even if the list contains the name twice.
void CommDebugMode::on_collective(CommKind kind, int64_t bytes, const comm::Group&) {
  std::lock_guard lock(mutex_);
  add(all_, kind, bytes);
  for (const auto& name : std::set<std::string>(modules.begin(), modules.end())) add(by_module_[name], kind, bytes);
}

std::string CommDebugMode::table() const {
  std::string text = all_.table("Global");
  for (const auto& [name, counts] : by_module_) text += counts.table(name);
  return text;
}

std::string CommDebugMode::json() const {
  nlohmann::ordered_json all = {{"Global", json_of(all_)}, {"modules", nlohmann::ordered_json::object()}};
  for (const auto& [name, counts] : by_module_) all["modules"][name] = json_of(counts);
  return all.dump(2, ' ', /*ensure_ascii=*/false, nlohmann::ordered_json::error_handler_t::replace);
}

void CommDebugMode::enter_module(const std::string& name) { modules.push_back(name); }

void CommDebugMode::leave_module(const std::string& name) {
  const auto found = std::find(modules.rbegin(), modules.rend(), name);
  if (found != modules.rend()) modules.erase(found.base() - 1);
}

}  // namespace tessera
