#include "tessera/comm/shm/engine_work.h"

#include "tessera/comm/shm/engine.h"

namespace tessera::comm::shm {

using std::chrono::milliseconds;

EngineWork::EngineWork(std::shared_ptr<Engine> engine, c10d::OpType type, milliseconds timeout)
    : Work(engine->channel().rank(), type), engine_(std::move(engine)), deadline_(Clock::now() + timeout) {}

bool EngineWork::isCompleted() { return engine_->poll(*this); }

bool EngineWork::isSuccess() const {
  const std::lock_guard lock(mutex_);
  return completed_ && !exception_;
}

bool EngineWork::wait(milliseconds timeout) {
  const bool limited = timeout != kNoTimeout && timeout != c10d::kUnsetTimeout;
  engine_->wait(*this, limited ? Clock::now() + timeout : Clock::time_point::max());
  const std::lock_guard lock(mutex_);
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

void EngineWork::abort() { engine_->abort_group(engine_->channel().name_of(rank_) + " aborted the group"); }

CollectiveWork::CollectiveWork(std::shared_ptr<Engine> engine, c10d::OpType type, uint64_t sequence,
                               std::unique_ptr<Operation> operation, milliseconds timeout,
                               std::vector<at::Tensor> tensors, std::vector<at::Tensor> results)
    : EngineWork(std::move(engine), type, timeout),
      sequence_(sequence),
      operation_(std::move(operation)),
      tensors_(std::move(tensors)),
      results_(std::move(results)) {}

}  // namespace tessera::comm::shm
