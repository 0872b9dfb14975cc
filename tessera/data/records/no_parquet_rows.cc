// Used instead of parquet_rows.cc when the build found no libparquet.
#include "tessera/base/error.h"
#include "tessera/data/records/row_source.h"

namespace tessera::data {

bool reads_parquet() { return false; }

std::unique_ptr<RowSource> open_parquet(const std::filesystem::path& path) {
  raise(ErrorKind::kConfig,
        "[data.read] {}: is Parquet, which this build cannot read: it was built without libparquet. Run './dev build' "
        "again where "
        "'pip install --require-hashes -r scripts/arrow.lock' works (it fetches pyarrow's), or convert the file to "
        ".jsonl.",
        path.string());
}

}  // namespace tessera::data
