// Where the ranks of a program tell one another how a phase of it went, without the collectives that may just have
// failed.
//
//   const std::vector<Word> words = meeting.tell(rank, std::move(own));   // those of all ranks, alike on all
//
// Thread-safe: each rank calls from its own thread.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace tessera::testing {

// What a rank has to say after a phase.
struct Word {
  std::string error;  // raised, by libtorch or by this library
  bool peer_failed = false;
  int step = -1;          // where
  std::string wrong;      // a value that differs from the plain one
  std::string signature;  // of what it holds
};

// A rank waited in vain.
struct RanksParted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Meeting {
 public:
  Meeting(int size, std::chrono::milliseconds patience) : words_(size), here_(size), patience_(patience) {}

  // Throws RanksParted on every rank that comes once one has waited longer than `patience` for another.
  std::vector<Word> tell(int rank, Word word) {
    std::unique_lock lock(mutex_);
    if (broken_) {  // by one that waited too long for this one
      throw RanksParted(parting_);
    }
    words_[rank] = std::move(word);
    here_[rank] = true;
    const int64_t round = round_;
    if (std::all_of(here_.begin(), here_.end(), [](bool here) { return here; })) {
      heard_ = words_;
      here_.assign(here_.size(), false);
      ++round_;
      arrive_.notify_all();
      return heard_;
    }
    const auto over = [&] { return round_ != round || broken_; };
    if (!arrive_.wait_for(lock, patience_, over) || (broken_ && round_ == round)) {
      if (!broken_) {
        parting_ = said();
      }
      broken_ = true;
      arrive_.notify_all();
      throw RanksParted(parting_);
    }
    return heard_;
  }
  // What was said when one rank did not come.
  std::string parting() {
    const std::lock_guard lock(mutex_);
    return parting_;
  }

 private:
  std::string said() const {
    std::string text;
    for (size_t r = 0; r < words_.size(); ++r) {
      text += fmt::format("\n  rank {}: {}", r,
                          !here_[r]                 ? "waits"
                          : words_[r].error.empty() ? "went on"
                                                    : words_[r].error);
    }
    return text;
  }

  std::mutex mutex_;
  std::condition_variable arrive_;
  std::vector<Word> words_, heard_;
  std::vector<bool> here_;
  std::chrono::milliseconds patience_;
  int64_t round_ = 0;
  bool broken_ = false;
  std::string parting_;
};

}  // namespace tessera::testing
