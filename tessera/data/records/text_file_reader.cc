#include "tessera/data/records/text_file_reader.h"

#include "tessera/base/text/utf8.h"
#include "tessera/data/records/encoding.h"

namespace tessera::data {

// Reads 1 MiB. A character that is cut at the end of the chunk is kept in cut_character_ and completed by the next
// chunk, so a character is never reported as invalid only because it was cut.
bool TextFileReader::read_more(std::string& text) {
  constexpr size_t kAtOnce = size_t{1} << 20;
  std::string chunk = std::move(cut_character_);
  const size_t kept = chunk.size();
  chunk.resize(kept + kAtOnce);
  chunk.resize(kept + bytes_->read({chunk.data() + kept, kAtOnce}));
  const bool at_end = chunk.size() < kept + kAtOnce;
  cut_character_.clear();
  if (!at_end) {
    const size_t good = valid_utf8_prefix(chunk);
    if (good < chunk.size() && good + invalid_utf8_length(std::string_view(chunk).substr(good)) == chunk.size()) {
      cut_character_ = chunk.substr(good);
      chunk.resize(good);
    }
  }
  check_encoding(chunk, path_, offset_);
  const bool first = offset_ == 0;
  offset_ += chunk.size();
  std::string_view found = chunk;
  if (first && found.starts_with("\xef\xbb\xbf")) found.remove_prefix(3);
  text += found;
  return !chunk.empty();
}

}  // namespace tessera::data
