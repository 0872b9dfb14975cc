// A memory budget that several grammars share, for their parts, states and masks.
//
//   const auto memory = std::make_shared<GrammarMemory>(size_t{256} << 20);
//   GrammarMemory::Account account(memory, grammar.bytes());
//   account.set_states(states.bytes());
//   if (states.bytes() > memory->bytes_per_grammar()) ...  // drop the states that are not in use
//
// Thread-safe. Each grammar has one Account, which is not thread-safe.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>

namespace tessera::text {

class GrammarMemory {
 public:
  explicit GrammarMemory(size_t max_bytes) : max_bytes_(max_bytes) {}

  // The bytes of states and masks that one grammar may keep: an equal share of the budget, but at least
  // kMinBytesPerGrammar, without which no grammar could be used.
  size_t bytes_per_grammar() const {
    return std::max(kMinBytesPerGrammar, max_bytes_ / static_cast<size_t>(std::max<int64_t>(1, accounts_.load())));
  }
  size_t grammar_bytes() const { return grammar_bytes_.load(); }          // bytes of the parts of all grammars
  size_t bytes() const { return grammar_bytes() + state_bytes_.load(); }  // bytes of all grammars with states and masks

  class Account {
   public:
    Account(std::shared_ptr<GrammarMemory> memory, size_t grammar_bytes)
        : memory_(std::move(memory)), grammar_bytes_(grammar_bytes) {
      ++memory_->accounts_;
      memory_->grammar_bytes_ += grammar_bytes_;
    }
    ~Account() {
      set_states(0);
      memory_->grammar_bytes_ -= grammar_bytes_;
      --memory_->accounts_;
    }
    Account(const Account&) = delete;
    Account& operator=(const Account&) = delete;
    void set_states(size_t bytes) {
      memory_->state_bytes_ += bytes - state_bytes_;  // unsigned arithmetic, also right when `bytes` is smaller
      state_bytes_ = bytes;
    }
    size_t grammar_bytes() const { return grammar_bytes_; }
    const GrammarMemory& memory() const { return *memory_; }

   private:
    std::shared_ptr<GrammarMemory> memory_;
    const size_t grammar_bytes_;
    size_t state_bytes_ = 0;
  };

 private:
  static constexpr size_t kMinBytesPerGrammar = size_t{2} << 20;
  const size_t max_bytes_;
  std::atomic<size_t> grammar_bytes_ = 0, state_bytes_ = 0;
  std::atomic<int64_t> accounts_ = 0;
};

}  // namespace tessera::text
