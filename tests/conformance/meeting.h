// An exchange of messages between the thread ranks of a test case. It works without collectives, because a collective
// may just have failed.
//
//   const std::vector<Word> words = meeting.tell(rank, std::move(own));   // words of all ranks, equal on all
//
// A word is a string, or a struct with a string named `error`. Thread-safe: each rank calls from its own thread.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace tessera::testing {

// Thrown if a rank waited in vain.
struct RanksParted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class Word>
class Meeting {
 public:
  explicit Meeting(int size, std::chrono::milliseconds patience = std::chrono::seconds(15))
      : words_(size), here_(size), patience_(patience) {}

  // Returns the words of all ranks. If a rank has waited longer than `patience` for another rank, throws RanksParted on
  // every rank that calls.
  std::vector<Word> tell(int rank, Word word) {
    std::unique_lock lock(mutex_);
    if (broken_) {  // another rank waited too long for this rank
      throw RanksParted(parting_);
    }
    words_[rank] = std::move(word);
    here_[rank] = true;
    const int64_t round = round_;
    if (std::ranges::all_of(here_, [](bool here) { return here; })) {
      heard_ = words_;
      here_.assign(here_.size(), false);
      ++round_;
      arrive_.notify_all();
      return heard_;
    }
    const auto over = [&] { return round_ != round || broken_; };
    // The wait is counted in slices. If the machine stands still for a while, the pause counts as one slice.
    for (auto waited = std::chrono::milliseconds(0); waited < patience_ && !over(); waited += kSlice) {
      arrive_.wait_for(lock, kSlice, over);
    }
    if (round_ == round) {
      if (!broken_) parting_ = said();
      broken_ = true;
      arrive_.notify_all();
      throw RanksParted(parting_);
    }
    return heard_;
  }
  // Returns the text of the error after one rank did not call.
  std::string parting() {
    const std::lock_guard lock(mutex_);
    return parting_;
  }

 private:
  static constexpr std::chrono::milliseconds kSlice{50};

  static const std::string& error_of(const Word& word) {
    if constexpr (std::is_same_v<Word, std::string>) {
      return word;
    } else {
      return word.error;
    }
  }
  std::string said() const {
    std::string text = "the ranks parted:";
    for (size_t r = 0; r < words_.size(); ++r) {
      const auto& error = error_of(words_[r]);
      text += fmt::format("\n  rank {}: {}", r, !here_[r] ? "waits" : error.empty() ? "went on" : error);
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
