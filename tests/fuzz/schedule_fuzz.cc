// Fuzz target: any bytes as a pipeline schedule. A schedule that is read is written and reads back equal. A schedule
// that passes the check can be lowered, and its ranks do not wait for ever.
#include <cstdlib>

#include "tessera/base/error.h"
#include "tessera/parallel/pipeline/check_schedule.h"
#include "tessera/parallel/pipeline/lowering.h"
#include "tests/fuzz/input_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tessera::pipeline;
  ScheduleTable table;
  try {
    table = ScheduleTable::from_csv(tessera::fuzz::text_of(data, size), "fuzz");
  } catch (const tessera::Error& error) {
    if (error.kind() != tessera::ErrorKind::kFormat) std::abort();
    return 0;
  }
  if (!(ScheduleTable::from_csv(table.to_csv(), "again") == table)) std::abort();
  try {
    const auto schedule = schedule_of_table(std::move(table), "fuzz");
    check_lowered(lower(schedule), schedule.rank_of, schedule.micro_batches);
    if (simulate(schedule).time <= 0) std::abort();
  } catch (const tessera::Error& error) {
    if (error.kind() != tessera::ErrorKind::kConfig) std::abort();
  }
  return 0;
}
