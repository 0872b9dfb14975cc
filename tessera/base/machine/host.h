// Properties of this machine that ranks compare or agree on.
//
//   if (host_identity() == other) ...            // both are reachable over loopback
//   std::string both = union_of_core_masks(core_mask(), other_mask);
//   const int cores = count_cores(both);
//
// Thread-safe.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

std::string host_name();  // "" when the host has no name

// One line that is equal for processes that reach each other over loopback: host name, boot id and network namespace. A
// host name alone would not do, because clusters and containers reuse names, and copies of a virtual machine may have
// the same boot id.
std::string host_identity();
// One line that is equal for processes that can share memory and see each other's process ids: boot id, process,
// network and user namespace, and user. Error kIo when /proc lacks one of them.
std::string memory_identity();

// The model of the first processor, e.g. "AMD EPYC (family 25, model 17)"; family and model are added because
// generations with different speed share a name. "unknown processor" when /proc/cpuinfo has no name.
std::string processor_model();

// The cores that this process may run on (its affinity), as hexadecimal digits; the first digit stands for cores 0
// to 3.
std::string core_mask();
int count_cores(std::string_view mask);
// The union of two core masks, both in the form of core_mask().
std::string union_of_core_masks(std::string_view one, std::string_view other);
int usable_cores();  // count_cores(core_mask()), at least 1

// Raises the soft limit of open files to the hard limit, at most 65,536: a rank needs a descriptor for each peer of a
// group.
void raise_open_files_limit() noexcept;

}  // namespace tessera
