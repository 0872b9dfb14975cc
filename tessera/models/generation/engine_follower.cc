#include "tessera/models/generation/engine_follower.h"

#include <optional>

#include "tessera/base/files/copy_bytes.h"
#include "tessera/comm/collectives/collectives.h"

namespace tessera {
namespace {

// The kinds of messages. The first number of a message is its kind.
enum StepMessage : int64_t { kEnd, kWait, kBegin, kRows };

void broadcast_message(comm::Group& group, const std::vector<int64_t>& numbers) {
  broadcast_numbers(group, numbers, group.rank());
}

// Decodes the message of broadcast_rows. `pages` owns the page lists that the rows' spans refer to.
StepRows decode_rows(const std::vector<int64_t>& numbers, std::vector<std::vector<int32_t>>& pages) {
  size_t at = 1;
  const auto next = [&] { return numbers.at(at++); };
  StepRows rows;
  for (auto* list : {&rows.tokens, &rows.positions, &rows.rotary_lengths, &rows.logits_rows}) {
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

void broadcast_begin(comm::Group& group, int64_t pages) { broadcast_message(group, {kBegin, pages}); }
void broadcast_wait(comm::Group& group) { broadcast_message(group, {kWait}); }
void broadcast_end(comm::Group& group) { broadcast_message(group, {kEnd}); }

// The message is kRows, then the lists tokens, positions, rotary_lengths and logits_rows of `rows` (each as its length
// and its numbers), then the number of sequences, then for each sequence first_row, rows, first_position and the list
// of its pages.
void broadcast_rows(comm::Group& group, const StepRows& rows) {
  std::vector<int64_t> numbers = {kRows};
  const auto add = [&](const auto& list) {
    numbers.push_back(static_cast<int64_t>(list.size()));
    numbers.insert(numbers.end(), list.begin(), list.end());
  };
  add(rows.tokens);
  add(rows.positions);
  add(rows.rotary_lengths);
  add(rows.logits_rows);
  numbers.push_back(static_cast<int64_t>(rows.sequences.size()));
  for (const auto& sequence : rows.sequences) {
    numbers.insert(numbers.end(), {sequence.first_row, sequence.rows, sequence.first_position});
    add(sequence.pages);
  }
  broadcast_message(group, numbers);
}

void run_engine_follower(CausalLM& model, comm::Group& group) {
  run_engine_follower(model.config(), rows_forward(model), group, 0);
}

void run_engine_follower(const ModelConfig& config, const RowsForward& forward, comm::Group& group, int leader) {
  std::optional<nn::PagedKVCache> store;
  std::vector<std::vector<int32_t>> pages;
  while (true) {
    // The leader broadcasts one message per forward. Only the leader schedules sequences; this rank runs the forward
    // that the message describes.
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
        forward(store.value(), decode_rows(numbers, pages));
    }
  }
}

}  // namespace tessera
