// A scope object that exists during one redistribution. The constructor raises an error if an ExplicitRedistribution
// forbids the redistribution. The destructor adds the redistribution and its collectives to every RedistributionLog.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "tessera/dtensor/redistribute/redistribute.h"
#include "tessera/dtensor/redistribute/redistribution_log.h"

namespace tessera {

class RedistributionScope {
 public:
  struct Request {
    const char* cause;
    const char* argument;
    int element;               // position in a tensor list; -1 for an argument that is not a list
    const at::Tensor& tensor;  // the tensor before the redistribution
    const Placements& to;
    const RedistributeSteps& steps;
    bool is_explicit;
  };
  // Raises Error kShape if the innermost ExplicitRedistribution forbids the redistribution.
  explicit RedistributionScope(const Request& request);
  ~RedistributionScope();
  RedistributionScope(const RedistributionScope&) = delete;
  RedistributionScope& operator=(const RedistributionScope&) = delete;

 private:
  struct Recording {
    Redistribution record;
    CommDebugMode comm;
  };
  std::unique_ptr<Recording> recording_;
};

}  // namespace tessera
