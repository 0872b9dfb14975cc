// Makes samples of records on several threads and passes them on in the order of the records.
//
//   SampleBatches batches(maker, [&](const Record& record, const Sample& sample) { ... });
//   read_records(file, source, [&](Record record) { batches.add(std::move(record)); });
//   batches.finish();
//
// At most 256 records are held, or fewer when their text reaches 4 MiB. Errors come in the order of the records, too:
// the first bad record is reported, whichever thread finds an error first. One object belongs to one thread.
#pragma once

#include <functional>
#include <vector>

#include "tessera/data/records/samples.h"

namespace tessera::data {

class SampleBatches {
 public:
  using Take = std::function<void(const Record&, const Sample&)>;
  SampleBatches(const SampleMaker& maker, Take take) : maker_(maker), take_(std::move(take)) {}

  void add(Record record);
  void finish();

 private:
  const SampleMaker& maker_;
  Take take_;
  std::vector<Record> records_;
  size_t text_bytes_ = 0;
};

}  // namespace tessera::data
