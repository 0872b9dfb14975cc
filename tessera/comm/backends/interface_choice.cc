#include "tessera/comm/backends/interface_choice.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"

namespace tessera::comm {
namespace {

bool is_ipv6(std::string_view address) { return address.find(':') != address.npos; }

const char* wish_variable() {
  for (const char* name : {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}) {
    const char* value = std::getenv(name);
    if (value && *value) return name;
  }
  return nullptr;
}

}  // namespace

// The same rules as NCCL's for NCCL_SOCKET_IFNAME. "^" and "=" may be combined ("^=eth0"), and apply to the whole list.
bool interface_fits(std::string_view wish, std::string_view name) {
  const bool excludes = wish.starts_with('^');
  if (excludes) wish.remove_prefix(1);
  const bool whole = wish.starts_with('=');
  if (whole) wish.remove_prefix(1);
  bool listed = false;
  while (!wish.empty()) {
    const std::string_view word = wish.substr(0, wish.find(','));
    wish.remove_prefix(std::min(word.size() + 1, wish.size()));
    if (word.empty()) continue;
    listed = listed || (whole ? name == word : name.starts_with(word));
  }
  return listed != excludes;
}

std::string choose_address(const std::vector<InterfaceAddress>& interfaces, std::string_view wish,
                           const std::string& natural) {
  std::vector<InterfaceAddress> fitting;
  for (const InterfaceAddress& one : interfaces) {
    if (interface_fits(wish, one.name)) fitting.push_back(one);
  }
  const auto taken = [&](const auto& suits) {
    const auto found = std::ranges::find_if(fitting, suits);
    return found == fitting.end() ? "" : found->address;
  };
  std::string found = taken([&](const InterfaceAddress& one) { return one.address == natural; });
  // First non-loopback, then loopback; in each case first the family of `natural` (IPv4 if there is none).
  const bool ipv6 = is_ipv6(natural);
  for (const bool loopback : {false, true}) {
    for (const bool other_family : {false, true}) {
      if (!found.empty()) return found;
      found = taken([&](const InterfaceAddress& one) {
        return (one.name == "lo") == loopback && (is_ipv6(one.address) == ipv6) != other_family;
      });
    }
  }
  return found;
}

std::string wished_interfaces() {
  const char* name = wish_variable();
  return name ? std::getenv(name) : "";
}

std::string own_address(const std::string& towards) {
  std::string natural = address_towards(towards);
  const auto wish = wished_interfaces();
  if (wish.empty()) return natural;
  const auto interfaces = interfaces_of_this_host();
  std::string found = choose_address(interfaces, wish, natural);
  if (!found.empty()) return found;
  std::set<std::string> names;
  for (const InterfaceAddress& one : interfaces) names.insert(one.name);
  raise(ErrorKind::kConfig, "[comm.interface] {}={}: no active network interface fits. This host has {}.",
        wish_variable(), quote(wish, 80), fmt::join(names, ", "));
}

}  // namespace tessera::comm
