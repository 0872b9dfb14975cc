// Waits for several works, for all of them also when one fails, and throws the first failure. Internal to comm.
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
