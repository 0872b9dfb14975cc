#include "tests/conformance/programs/ranks_session.h"

#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "tessera/comm/rendezvous/thread_ranks.h"
#include "tests/conformance/programs/rank_run.h"

namespace tessera::testing {

class RanksSession::Impl {
 public:
  Impl(std::vector<int64_t> mesh, std::string device) : mesh(std::move(mesh)), device_(std::move(device)) {}
  ~Impl() { end(); }

  Verdict run(std::shared_ptr<const Trial> trial) {
    if (!host_.joinable()) start();
    std::unique_lock lock(mutex_);
    trial_ = std::move(trial);
    verdict_.reset();
    ++number_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return verdict_ || ended_; });
    if (verdict_) {
      const Verdict verdict = *verdict_;
      lock.unlock();
      if (verdict.parted) end();
      return verdict;
    }
    lock.unlock();
    end();
    Verdict verdict;
    verdict.parted = true;
    verdict.kind = Verdict::Kind::kWrong;
    verdict.label = kParted;
    verdict.what = meeting_->parting();
    return verdict;
  }

  const std::vector<int64_t> mesh;
  std::chrono::milliseconds patience{15000};

 private:
  void start() {
    const int size = static_cast<int>(c10::multiply_integers(mesh));
    meeting_ = std::make_unique<Meeting<Word>>(size, patience);
    ended_ = stop_ = false;
    host_ = std::thread([this, size] {
      try {
        comm::run_thread_ranks(size, [&](const std::shared_ptr<comm::World>& world) { serve(world); });
      } catch (const std::exception&) {  // the meeting has its error
      }
      const std::lock_guard lock(mutex_);
      ended_ = true;
      changed_.notify_all();
    });
  }

  void end() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
      changed_.notify_all();
    }
    if (host_.joinable()) host_.join();
    trial_.reset();
  }

  void serve(const std::shared_ptr<comm::World>& world) {
    const auto on = init_device_mesh(world, device_, mesh);
    int64_t done = 0;
    {
      const std::lock_guard lock(mutex_);
      done = number_ - (trial_ != nullptr && !verdict_ ? 1 : 0);
    }
    for (;;) {
      std::shared_ptr<const Trial> trial;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return stop_ || number_ != done; });
        if (stop_) return;
        done = number_;
        trial = trial_;
      }
      Verdict verdict = run_on_rank(*trial, on, world->rank(), *meeting_);
      if (world->rank() == 0) {
        const std::lock_guard lock(mutex_);
        verdict_ = std::move(verdict);
        changed_.notify_all();
      }
    }
  }

  const std::string device_;
  std::thread host_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<Meeting<Word>> meeting_;
  std::shared_ptr<const Trial> trial_;
  std::optional<Verdict> verdict_;
  int64_t number_ = 0;
  bool ended_ = false;
  bool stop_ = false;
};

RanksSession::RanksSession(std::vector<int64_t> mesh, std::string device)
    : impl_(std::make_unique<Impl>(std::move(mesh), std::move(device))) {}
RanksSession::~RanksSession() = default;
void RanksSession::set_patience(std::chrono::milliseconds patience) { impl_->patience = patience; }
Verdict RanksSession::run(std::shared_ptr<const Trial> trial) { return impl_->run(std::move(trial)); }
const std::vector<int64_t>& RanksSession::mesh() const { return impl_->mesh; }

}  // namespace tessera::testing
