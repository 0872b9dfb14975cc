#include "tessera/dtensor/redistribute/redistribution_log.h"

#include <fmt/ranges.h>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/dtensor/redistribute/redistribution_scope.h"
#include "tessera/dtensor/tensor/dtensor_impl.h"

namespace tessera {

namespace {
using comm::ContextValue;
const comm::ContextKey kLog{"redistribution log"};
const comm::ContextKey kExplicit{"explicit redistribution"};
}  // namespace

std::string Redistribution::to_string() const {
  return fmt::format("{}: {} [{}] {} -> {}, {} collectives, {} bytes", cause, argument, fmt::join(shape, ", "),
                     tessera::to_string(from), tessera::to_string(to), comm_counts.total(), comm_counts.total_bytes());
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

std::map<std::string, CommCounts> RedistributionLog::by_cause() const {
  std::map<std::string, CommCounts> sums;
  for (const auto& record : records_) sums[record.cause] += record.comm_counts;
  return sums;
}

ExplicitRedistribution::ExplicitRedistribution(const Options& options)
    : options_(options), in_force_(kExplicit, this) {}

// The redistribution is recorded only if there is a RedistributionLog or an ExplicitRedistribution, or if the log level
// is debug. If the innermost ExplicitRedistribution forbids the redistribution, the constructor raises an error before
// the redistribution starts, so a forbidden redistribution does not communicate. The check does not depend on the
// values of tensors, so all ranks of the mesh raise the error.
RedistributionScope::RedistributionScope(const Request& request) {
  const auto* rule = static_cast<const ExplicitRedistribution*>(ContextValue::innermost(kExplicit));
  const bool is_watched =
      rule != nullptr || ContextValue::innermost(kLog) != nullptr || log_level() <= LogLevel::kDebug;
  if (!is_watched) return;
  // A plain tensor is recorded as a tensor that is replicated on every mesh dim. ExplicitRedistribution does not forbid
  // the redistribution of a plain tensor.
  const DTensorImpl* impl = is_dtensor_impl(*request.tensor.unsafeGetTensorImpl()) ? impl_of(request.tensor) : nullptr;
  Redistribution record{
      request.cause,
      request.element < 0 ? request.argument : fmt::format("{}[{}]", request.argument, request.element),
      request.tensor.sizes().vec(),
      impl != nullptr ? impl->placements() : Placements(request.to.size(), Replicate()),
      request.to,
      request.is_explicit,
      {}};
  if (rule != nullptr && rule->options().enable && !request.is_explicit && impl != nullptr) {
    const auto& options = rule->options();
    const bool moves = std::ranges::any_of(request.steps, communicates);
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
  recording_ = std::make_unique<Recording>();
  recording_->record = std::move(record);
}

RedistributionScope::~RedistributionScope() {
  if (!recording_) return;
  Redistribution& record = recording_->record;
  record.comm_counts = recording_->comm.comm_counts();
  ContextValue::for_each(kLog, [&](void* log) { static_cast<RedistributionLog*>(log)->add(record); });
  log_debug("[dtensor.redistribute] {}", record.to_string());
}

}  // namespace tessera
