// Waits for several works. All works are waited for even when one fails; then the first failure is thrown. Internal to
// comm.
//
//   wait_all(works);
#pragma once

#include <exception>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace tessera::comm {

inline void wait_all(const std::vector<c10::intrusive_ptr<c10d::Work>>& works,
                     std::chrono::milliseconds timeout = kNoTimeout) {
  std::exception_ptr first;
  for (const auto& work : works) {
    try {
      work->wait(timeout);
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace tessera::comm
