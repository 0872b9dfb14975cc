// Surrounds one redistribution: refuses it where only explicit ones are allowed, and records what it moved.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "tessera/dtensor/redistribute/redistribute.h"
#include "tessera/dtensor/redistribute/redistribution_log.h"

namespace tessera {

class RedistributionScope {
 public:
  struct What {
    const char* cause;
    const char* argument;
    int element;               // of a list; -1
    const at::Tensor& tensor;  // as it lies before
    const Placements& to;
    const Steps& steps;
    bool asked_for;
  };
  // Error kShape for one that is not allowed.
  explicit RedistributionScope(const What& what);
  ~RedistributionScope();
  RedistributionScope(const RedistributionScope&) = delete;
  RedistributionScope& operator=(const RedistributionScope&) = delete;

 private:
  struct Watch {
    Redistribution record;
    CommDebugMode comm;
  };
  std::unique_ptr<Watch> watch_;
};

}  // namespace tessera
