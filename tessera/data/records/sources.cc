#include "tessera/data/records/sources.h"

#include "tessera/base/error.h"
#include "tessera/data/records/megatron.h"
#include "tessera/data/records/text_file_reader.h"

namespace tessera::data {
namespace {

constexpr size_t kPartBytes = size_t{16} << 20;

bool is_blank(std::string_view text) { return text.find_first_not_of(" \t\r\n") == std::string_view::npos; }

// The position at which a part of a text stream ends: after the last newline within kPartBytes that no white space
// follows, because tokenizers may join white space across lines. If the second half of the part has no such newline,
// the part ends between two UTF-8 characters.
size_t end_of_part(std::string_view text) {
  for (size_t at = kPartBytes; at > kPartBytes / 2; --at) {
    if (text[at - 1] == '\n' && !is_blank(text.substr(at, 1))) return at;
  }
  size_t at = kPartBytes;
  while ((static_cast<unsigned char>(text[at]) & 0xc0) == 0x80) --at;
  return at;
}

// Reads more than kPartBytes before it cuts off a part, so it knows whether a part is the last one when it passes the
// part to `visit`.
std::optional<RecordKind> read_stream(const DataFile& file, const std::function<void(TrainingRecord)>& visit) {
  TextFileReader stream(file.path);
  TrainingRecord part{.kind = RecordKind::kStream, .last = false, .where = file.path.string()};
  std::string text;
  while (!part.last) {
    bool more = true;
    while (more && text.size() <= kPartBytes) more = stream.read_more(text);
    part.last = !more && text.size() <= kPartBytes;
    if (part.first && part.last && is_blank(text)) return std::nullopt;
    const size_t end = part.last ? text.size() : end_of_part(text);
    part.text = text.substr(0, end);
    text.erase(0, end);
    visit(part);
    part.first = false;
  }
  return RecordKind::kStream;
}

std::optional<RecordKind> read_ids(const DataFile& file, const std::function<void(TrainingRecord)>& visit) {
  const auto index = MegatronIndex::open(file.path);
  for (int64_t i = 0; i < index.documents(); ++i) {
    visit({.kind = RecordKind::kTokens,
           .tokens = index.document(i),
           .where = fmt::format("{} document {}", index.bin_path().string(), i)});
  }
  return index.documents() > 0 ? std::optional(RecordKind::kTokens) : std::nullopt;
}

}  // namespace

std::optional<RecordKind> read_records(const DataFile& file, const SourceOptions& options,
                                       const std::function<void(TrainingRecord)>& visit) {
  if (file.container == DataContainer::kMegatron) {
    TESSERA_CHECK(options.format == "auto" || options.format == "megatron", ErrorKind::kConfig,
                  "[data.read] {}: holds token ids, which data.format {} cannot read. Set it to auto or megatron.",
                  file.path.string(), options.format);
    return read_ids(file, visit);
  }
  if (file.container == DataContainer::kText) {
    TESSERA_CHECK(options.format == "auto" || options.format == "text", ErrorKind::kConfig,
                  "[data.read] {}: is plain text, which data.format {} cannot read. Set it to auto or text, or give "
                  "the file an extension of its format.",
                  file.path.string(), options.format);
    return read_stream(file, visit);
  }
  const auto rows = open_rows(file.path, file.container);
  RecordReader reader(options.format, options.columns);
  for (RecordRow row; rows->next(row);) visit(reader.read(row));
  return reader.kind();
}

}  // namespace tessera::data
