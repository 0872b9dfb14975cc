#include "tessera/comm/collectives/agreement.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/text/json_numbers.h"
#include "tessera/comm/collectives/collectives.h"

namespace tessera::comm {
namespace {

// Encodes an exception as one digit (its ErrorKind) followed by the first line of its message.
std::string packed(const std::exception& error) {
  return static_cast<char>('0' + static_cast<int>(as_error(error).kind())) + first_line(error);
}

constexpr JsonLimits kFactLimits{.max_bytes = size_t{16} << 20, .max_depth = 2, .max_keys = 0};

NamedValues parse_facts(const std::string& text, int rank) {
  const std::string where = fmt::format("[comm.agree] the facts of rank {}", rank);
  const Json json = parse_json(text, where, kFactLimits);
  NamedValues facts;
  for (const auto& fact : JsonReader(json, where, ErrorKind::kComm).items()) {
    const auto parts = fact.items();
    if (parts.size() != 2) fact.fail("a name and a value");
    facts.emplace_back(parts[0].as_string(), parts[1].as_string());
  }
  return facts;
}

}  // namespace

// Every rank reaches the all-gather whether or not its action threw, so no rank waits for a failed one. All ranks
// receive the same outcomes and therefore throw the same error; an empty outcome is success.
void attempt_together(Group& group, const std::function<void()>& action) {
  if (group.size() == 1) return action();
  std::string outcome;
  try {
    action();
  } catch (const std::exception& error) {
    outcome = packed(error);
  }
  const auto all = all_gather_bytes(group, outcome);
  for (size_t position = 0; position < all.size(); ++position) {
    if (all[position].empty()) continue;
    const auto kind = static_cast<ErrorKind>(all[position].front() - '0');
    throw Error(kind, fmt::format("rank {}: {}", group.ranks()[position], all[position].substr(1)));
  }
}

// The facts of all ranks are gathered as JSON and compared by position with those of the group's first rank. Every rank
// compares the same data, so all ranks throw or none does. Ranks may pass different numbers of facts: a missing fact is
// shown as "nothing".
void check_same(Group& group, const NamedValues& facts, std::string_view remedy) {
  if (group.size() == 1) return;
  Json own = Json::array();
  for (const auto& [name, value] : facts) own.push_back({name, value});
  std::vector<NamedValues> all;
  for (const auto& text : all_gather_bytes(group, dump_json(own))) {
    all.push_back(parse_facts(text, group.ranks()[all.size()]));
  }
  constexpr int kMaxShown = 3;
  int differ = 0;
  std::string message;
  const size_t facts_at_most = std::ranges::max(all, {}, &NamedValues::size).size();
  for (size_t fact = 0; fact < facts_at_most; ++fact) {
    const auto value = [&](size_t rank) { return fact < all[rank].size() ? &all[rank][fact] : nullptr; };
    const auto same = [&](size_t rank) {
      return value(rank) && value(0) ? *value(rank) == *value(0) : value(rank) == value(0);
    };
    size_t other = 1;
    while (other < all.size() && same(other)) ++other;
    if (other == all.size() || ++differ > kMaxShown) continue;
    const std::string& name = (value(0) ? value(0) : value(other))->first;
    const auto shown = [&](size_t rank) {
      if (value(rank) == nullptr) return std::string("nothing");
      return value(rank)->first == name ? value(rank)->second
                                        : fmt::format("{} {}", value(rank)->first, value(rank)->second);
    };
    message += fmt::format("{}{}: {} on rank {}, {} on rank {}", message.empty() ? "" : "; ", name, shown(0),
                           group.ranks()[0], shown(other), group.ranks()[other]);
  }
  if (differ > kMaxShown) message += fmt::format("; and {} more", differ - kMaxShown);
  TESSERA_CHECK(differ == 0, ErrorKind::kConfig, "[comm.agree] the ranks differ. {}. {}", message, remedy);
}

}  // namespace tessera::comm
