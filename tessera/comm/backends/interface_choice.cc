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

const char* interface_variable() {
  for (const char* name : {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}) {
    const char* value = std::getenv(name);
    if (value && *value) return name;
  }
  return nullptr;
}

}  // namespace

// Follows NCCL's rules for NCCL_SOCKET_IFNAME. "^" and "=" may be combined ("^=eth0"), and apply to the whole list.
bool interface_matches(std::string_view setting, std::string_view name) {
  const bool excludes = setting.starts_with('^');
  if (excludes) setting.remove_prefix(1);
  const bool whole = setting.starts_with('=');
  if (whole) setting.remove_prefix(1);
  bool listed = false;
  while (!setting.empty()) {
    const std::string_view word = setting.substr(0, setting.find(','));
    setting.remove_prefix(std::min(word.size() + 1, setting.size()));
    if (word.empty()) continue;
    listed = listed || (whole ? name == word : name.starts_with(word));
  }
  return listed != excludes;
}

std::string choose_address(const std::vector<InterfaceAddress>& interfaces, std::string_view setting,
                           const std::string& kernel_address) {
  std::vector<InterfaceAddress> fitting;
  for (const InterfaceAddress& one : interfaces) {
    if (interface_matches(setting, one.name)) fitting.push_back(one);
  }
  const auto taken = [&](const auto& suits) {
    const auto found = std::ranges::find_if(fitting, suits);
    return found == fitting.end() ? "" : found->address;
  };
  std::string found = taken([&](const InterfaceAddress& one) { return one.address == kernel_address; });
  // If no fitting interface has the address `kernel_address`, the first other address is taken in this order: addresses
  // that are not loopback, then loopback. Within each of these two groups, addresses of the same family as
  // `kernel_address` come first (IPv4 if `kernel_address` is empty).
  const bool ipv6 = is_ipv6(kernel_address);
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

std::string requested_interfaces() {
  const char* name = interface_variable();
  return name ? std::getenv(name) : "";
}

std::string own_address(const std::string& towards) {
  std::string kernel_address = address_towards(towards);
  const auto setting = requested_interfaces();
  if (setting.empty()) return kernel_address;
  const auto interfaces = interfaces_of_this_host();
  std::string found = choose_address(interfaces, setting, kernel_address);
  if (!found.empty()) return found;
  std::set<std::string> names;
  for (const InterfaceAddress& one : interfaces) names.insert(one.name);
  raise(ErrorKind::kConfig, "[comm.interface] {}={}: no active network interface fits. This host has {}.",
        interface_variable(), quote(setting, 80), fmt::join(names, ", "));
}

}  // namespace tessera::comm
