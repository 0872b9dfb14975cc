// The machine that this process runs on, as far as ranks must agree on it.
//
//   if (host_identity() == other) ...            // loopback leads there
//   std::string both = united(core_mask(), mask_of_the_other);
//   const int cores = count_cores(both);
//
// Thread-safe.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

std::string host_name();  // "" when there is none

// One line, equal for processes that reach one another over loopback: host name, boot and network namespace. Host names
// alone repeat between clusters and containers, boots between copies of a virtual machine.
std::string host_identity();
// One line, equal for processes that can share memory and see one another: boot, process, network and user namespace,
// and user. Error kIo when /proc does not say.
std::string memory_identity();

// The first processor: "AMD EPYC (family 25, model 17)", since generations of twice the speed share a name; "unknown
// processor" where /proc/cpuinfo does not say.
std::string processor_model();

// The cores that this process may run on (its affinity, not the machine), as hexadecimal digits, cores 0 to 3 first.
std::string core_mask();
int count_cores(std::string_view mask);
std::string united(std::string_view one, std::string_view other);
int usable_cores();  // count_cores(core_mask()), at least 1

// Raises the soft limit of open files to the hard one, 65,536 at most: a rank needs one for each peer of a group.
void raise_open_files_limit() noexcept;

}  // namespace tessera
