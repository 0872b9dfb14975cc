#include "tessera/data/records/row_source.h"

#include "tessera/base/enum_name.h"
#include "tessera/base/error.h"
#include "tessera/data/records/byte_stream.h"

namespace tessera::data {

const char* to_string(DataContainer container) {
  return enum_name(container, {"text", "JSON lines", "a JSON array", "Parquet", "Megatron's token ids"}, "");
}

DataContainer container_of(const std::filesystem::path& path) {
  auto extension = path.extension();
  if (extension == ".gz") extension = path.stem().extension();
  if (extension == ".jsonl" || extension == ".ndjson") return DataContainer::kJsonLines;
  if (extension == ".txt") return DataContainer::kText;
  if (extension == ".parquet") return DataContainer::kParquet;
  if (extension == ".bin" || extension == ".idx") return DataContainer::kMegatron;
  std::string front(4096, '\0');
  front.resize(ByteStream::open(path)->read(front));
  if (front.starts_with("PAR1")) return DataContainer::kParquet;
  const size_t mark = front.starts_with("\xef\xbb\xbf") ? 3 : 0;
  const size_t first = front.find_first_not_of(" \t\r\n", mark);
  if (extension == ".json") {
    // In JSON lines each line has a whole object, so a line with only "{" means that one object is printed over several
    // lines.
    const auto line = std::string_view(front).substr(std::min(first, front.size()));
    TESSERA_CHECK(!line.starts_with("{\n") && !line.starts_with("{\r\n"), ErrorKind::kFormat,
                  "[data.read] {}: is one object over several lines, wanted an array of records, or a record a line.",
                  path.string());
    return first != front.npos && front[first] == '[' ? DataContainer::kJsonArray : DataContainer::kJsonLines;
  }
  return first != front.npos && front[first] == '{' ? DataContainer::kJsonLines : DataContainer::kText;
}

std::unique_ptr<RowSource> open_rows(const std::filesystem::path& path, DataContainer container) {
  switch (container) {
    case DataContainer::kJsonLines:
      return open_json_lines(path);
    case DataContainer::kJsonArray:
      return open_json_array(path);
    case DataContainer::kParquet:
      return open_parquet(path);
    default:
      raise(ErrorKind::kInternal, "[data.read] {}: {} holds no rows.", path.string(), to_string(container));
  }
}

}  // namespace tessera::data
