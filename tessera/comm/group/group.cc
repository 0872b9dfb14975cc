#include "tessera/comm/group/group.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/base/error.h"
#include "tessera/comm/group/signature.h"

namespace tessera::comm {

Group::Group(std::string name, std::vector<int> ranks, int rank, c10::intrusive_ptr<c10d::Backend> backend,
             GroupContext context)
    : name_(std::move(name)),
      ranks_(std::move(ranks)),
      rank_(rank),
      backend_(std::move(backend)),
      context_(std::move(context)),
      comparing_(dynamic_cast<ComparesSignatures*>(backend_.get())) {
  TESSERA_CHECK(rank_ >= 0 && rank_ < size(), ErrorKind::kInternal, "[comm] group '{}': rank {} of {}", name_, rank_,
                size());
  TESSERA_CHECK(size() == 1 || backend_, ErrorKind::kInternal, "[comm] group '{}' of {} ranks has no back-end", name_,
                size());
}

Group::~Group() = default;

c10d::Backend& Group::backend() const {
  TESSERA_CHECK(backend_, ErrorKind::kInternal, "[comm] group '{}' of one rank has no back-end", name_);
  return *backend_;
}

c10d::Backend& Group::backend(c10::DeviceType device) const {
  return device != c10::DeviceType::CPU && context_.accelerator ? *context_.accelerator : backend();
}

c10::Allocator* Group::allocator(c10::DeviceType device) const {
  const bool shares = device == c10::DeviceType::CPU && backend_ && backend_->supportsTensorAlloc(0);
  return shares ? backend_->getMemAllocator().get() : nullptr;
}

// Both back-ends are aborted even when the abort of the first one throws.
void Group::abort() noexcept {
  for (const auto* backend : {&backend_, &context_.accelerator}) {
    try {
      if (*backend) (*backend)->abort();
    } catch (...) {  // the connections were closed before
    }
  }
}

}  // namespace tessera::comm
