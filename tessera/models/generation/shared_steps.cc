#include "tessera/models/generation/shared_steps.h"

#include <optional>

#include "tessera/base/files/copy_bytes.h"
#include "tessera/comm/collectives/collectives.h"

namespace tessera {
namespace {

// The first number of a message.
enum Told : int64_t { kEnd, kWait, kBegin, kRows };

void tell(comm::Group& group, const std::vector<int64_t>& numbers) { broadcast_numbers(group, numbers, group.rank()); }

// Decodes the message of tell_rows. `pages` owns the page lists that the rows' spans refer to.
StepRows rows_of(const std::vector<int64_t>& numbers, std::vector<std::vector<int32_t>>& pages) {
  size_t at = 1;
  const auto next = [&] { return numbers.at(at++); };
  StepRows rows;
  for (auto* list : {&rows.tokens, &rows.positions, &rows.rotary_lengths, &rows.wanted}) {
    list->resize(static_cast<size_t>(next()));
    for (auto& number : *list) number = next();
  }
  rows.sequences.resize(static_cast<size_t>(next()));
  pages.resize(rows.sequences.size());
  for (size_t i = 0; i < pages.size(); ++i) {
    auto& sequence = rows.sequences[i];
    for (auto* number : {&sequence.first_row, &sequence.rows, &sequence.first_position}) *number = next();
    pages[i].resize(static_cast<size_t>(next()));
    for (auto& page : pages[i]) page = static_cast<int32_t>(next());
    sequence.pages = pages[i];
  }
  return rows;
}

}  // namespace

std::vector<int64_t> broadcast_numbers(comm::Group& group, std::span<const int64_t> numbers, int root) {
  const auto bytes =
      comm::broadcast_bytes(group, {reinterpret_cast<const char*>(numbers.data()), numbers.size_bytes()}, root);
  std::vector<int64_t> received(bytes.size() / sizeof(int64_t));
  copy_bytes(received.data(), bytes.data(), bytes.size());
  return received;
}

void tell_begin(comm::Group& group, int64_t pages) { tell(group, {kBegin, pages}); }
void tell_wait(comm::Group& group) { tell(group, {kWait}); }
void tell_end(comm::Group& group) { tell(group, {kEnd}); }

// The layout is: kRows, then four lists (length, numbers), then for each sequence three numbers and its list of pages.
void tell_rows(comm::Group& group, const StepRows& rows) {
  std::vector<int64_t> numbers = {kRows};
  const auto add = [&](const auto& list) {
    numbers.push_back(static_cast<int64_t>(list.size()));
    numbers.insert(numbers.end(), list.begin(), list.end());
  };
  add(rows.tokens);
  add(rows.positions);
  add(rows.rotary_lengths);
  add(rows.wanted);
  numbers.push_back(static_cast<int64_t>(rows.sequences.size()));
  for (const auto& sequence : rows.sequences) {
    numbers.insert(numbers.end(), {sequence.first_row, sequence.rows, sequence.first_position});
    add(sequence.pages);
  }
  tell(group, numbers);
}

void follow_steps(CausalLM& model, comm::Group& group) { follow_steps(model.config(), rows_forward(model), group, 0); }

void follow_steps(const ModelConfig& config, const RowsForward& forward, comm::Group& group, int leader) {
  std::optional<nn::PageStore> store;
  std::vector<std::vector<int32_t>> pages;
  while (true) {
    // The leader broadcasts one message per forward. This rank has no sequences and no own decisions, so it stays in
    // step with the leader.
    const auto numbers = broadcast_numbers(group, {}, leader);
    switch (numbers.at(0)) {
      case kEnd:
        return;
      case kWait:
        break;
      case kBegin:
        store.emplace(config.num_hidden_layers, numbers.at(1));
        break;
      default:
        forward(store.value(), rows_of(numbers, pages));
    }
  }
}

}  // namespace tessera
