#include "tessera/data/records/parallel_sample_maker.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <nlohmann/json.hpp>
#include <thread>

#include "tessera/base/machine/host.h"
#include "tessera/base/text/json.h"

namespace tessera::data {
namespace {

size_t bytes_of(const Json& json) {
  constexpr size_t kNode = 32;
  size_t bytes = kNode;
  if (json.is_string()) bytes += json.get_ref<const std::string&>().size();
  if (json.is_structured()) {
    for (const auto& child : json) bytes += bytes_of(child);
  }
  return bytes;
}

size_t bytes_of(const TrainingRecord& record) {
  return record.text.size() + record.input.size() + record.completion.size() +
         record.tokens.size() * sizeof(record.tokens[0]) + (record.json ? bytes_of(*record.json) : 0);
}

}  // namespace

void ParallelSampleMaker::add(TrainingRecord record) {
  constexpr size_t kRecords = 256, kTextBytes = size_t{4} << 20;
  text_bytes_ += bytes_of(record);
  records_.push_back(std::move(record));
  if (records_.size() >= kRecords || text_bytes_ >= kTextBytes) finish();
}

// Each thread takes the index of the next record from an atomic counter and writes only the sample and the error of
// this index, so no lock is needed. After the threads have ended, samples and errors are used in the order of the
// records.
void ParallelSampleMaker::finish() {
  constexpr int kMostThreads = 16;
  std::vector<TokenizedSample> samples(records_.size());
  std::vector<std::exception_ptr> errors(records_.size());
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < records_.size(); i = next++) {
      try {
        samples[i] = maker_.make(records_[i]);
      } catch (...) {
        errors[i] = std::current_exception();
      }
    }
  };
  {
    std::vector<std::jthread> threads;
    const auto wanted = std::min<size_t>(static_cast<size_t>(std::min(usable_cores(), kMostThreads)), records_.size());
    for (size_t i = 1; i < wanted; ++i) threads.emplace_back(work);
    work();
  }
  for (size_t i = 0; i < records_.size(); ++i) {
    if (errors[i]) std::rethrow_exception(errors[i]);
    visit_(records_[i], samples[i]);
  }
  records_.clear();
  text_bytes_ = 0;
}

}  // namespace tessera::data
