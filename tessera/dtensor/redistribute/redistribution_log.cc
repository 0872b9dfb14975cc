#include "tessera/dtensor/redistribute/redistribution_log.h"

#include <fmt/ranges.h>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/dtensor/redistribute/redistribution_scope.h"
#include "tessera/dtensor/tensor/dtensor_impl.h"

namespace tessera {

namespace {
using comm::Propagated;
const comm::PropagatedKind kLog{"redistribution log"};
const comm::PropagatedKind kExplicit{"explicit redistribution"};
}  // namespace

std::string Redistribution::to_string() const {
  return fmt::format("{}: {} [{}] {} -> {}, {} collectives, {} bytes", cause, argument, fmt::join(shape, ", "),
                     tessera::to_string(from), tessera::to_string(to), moved.total(), moved.total_bytes());
}

RedistributionLog::RedistributionLog() : in_force_(kLog, this) {}

void RedistributionLog::add(const Redistribution& record) {
  std::lock_guard lock(mutex_);
  records_.push_back(record);
}

std::string RedistributionLog::to_string() const {
  std::string text;
  for (const auto& record : records_) text += record.to_string() + '\n';
  return text;
}

std::map<std::string, CommTally> RedistributionLog::by_cause() const {
  std::map<std::string, CommTally> sums;
  for (const auto& record : records_) sums[record.cause] += record.moved;
  return sums;
}

ExplicitRedistribution::ExplicitRedistribution(const Options& options)
    : options_(options), in_force_(kExplicit, this) {}

// An observer is attached only if a log, an ExplicitRedistribution or log level debug needs it. The check runs before
// the redistribution, so a forbidden one communicates nothing. The placements decide, so all ranks of the mesh raise
// the error.
RedistributionScope::RedistributionScope(const What& what) {
  const auto* rule = static_cast<const ExplicitRedistribution*>(Propagated::innermost(kExplicit));
  const bool is_watched = rule != nullptr || Propagated::innermost(kLog) != nullptr || log_level() <= LogLevel::kDebug;
  if (!is_watched) return;
  // A plain tensor counts as replicated and is exempt from the check.
  const DTensorImpl* impl = is_dtensor_impl(*what.tensor.unsafeGetTensorImpl()) ? impl_of(what.tensor) : nullptr;
  Redistribution record{what.cause,
                        what.element < 0 ? what.argument : fmt::format("{}[{}]", what.argument, what.element),
                        what.tensor.sizes().vec(),
                        impl != nullptr ? impl->placements() : Placements(what.to.size(), Replicate()),
                        what.to,
                        what.asked_for,
                        {}};
  if (rule != nullptr && rule->options().enable && !what.asked_for && impl != nullptr) {
    const auto& options = rule->options();
    const bool moves = std::ranges::any_of(what.steps, communicates);
    if (moves || options.strict) {
      const std::string message = fmt::format(
          "[dtensor.dispatch] Implicit redistribution occurred for {} while ExplicitRedistributionContext was active: "
          "argument "
          "'{}' of shape [{}] would go from {} to {}. Call redistribute on it first.",
          record.cause, record.argument, fmt::join(record.shape, ", "), to_string(record.from), to_string(record.to));
      TESSERA_CHECK(options.warn, ErrorKind::kShape, "{}", message);
      log_warning("{}", message);
    }
  }
  watch_ = std::make_unique<Watch>();
  watch_->record = std::move(record);
}

RedistributionScope::~RedistributionScope() {
  if (!watch_) return;
  Redistribution& record = watch_->record;
  record.moved = watch_->comm.tally();
  Propagated::for_each(kLog, [&](void* log) { static_cast<RedistributionLog*>(log)->add(record); });
  log_debug("[dtensor.redistribute] {}", record.to_string());
}

}  // namespace tessera
