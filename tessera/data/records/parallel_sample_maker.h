// Makes samples of records on several threads and passes them on in the order of the records.
//
//   ParallelSampleMaker samples(maker, [&](const TrainingRecord& record, const TokenizedSample& sample) { ... });
//   read_records(file, source, [&](TrainingRecord record) { samples.add(std::move(record)); });
//   samples.finish();
//
// At most 256 records are held, or fewer when their text reaches 4 MiB. Errors come in the order of the records, too:
// the first bad record is reported, whichever thread finds an error first. One object belongs to one thread.
#pragma once

#include <functional>
#include <vector>

#include "tessera/data/records/samples.h"

namespace tessera::data {

class ParallelSampleMaker {
 public:
  using SampleVisitor = std::function<void(const TrainingRecord&, const TokenizedSample&)>;
  ParallelSampleMaker(const SampleMaker& maker, SampleVisitor visit) : maker_(maker), visit_(std::move(visit)) {}

  void add(TrainingRecord record);
  void finish();

 private:
  const SampleMaker& maker_;
  SampleVisitor visit_;
  std::vector<TrainingRecord> records_;
  size_t text_bytes_ = 0;
};

}  // namespace tessera::data
