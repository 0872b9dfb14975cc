#include "tessera/data/rows/packed_rows.h"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/files/mapped_file.h"
#include "tessera/base/text/json.h"
#include "tessera/data/rows/shuffle.h"

namespace tessera::data {
namespace {

constexpr int64_t kSetVersion = 1;
constexpr const char *kTokensName = "tokens.bin", *kEntriesName = "samples.bin", *kBoundsName = "rows.bin",
                     *kOrderName = "order.bin", *kSetName = "set.json";

// The position of a sample in tokens.bin.
struct SampleEntry {
  uint64_t begin = 0;   // number of tokens before the sample
  uint32_t length = 0;  // number of tokens
  uint32_t hash = 0;
};
static_assert(sizeof(SampleEntry) == 16);

uint32_t hash_of_sample(std::span<const PackedToken> tokens) {
  return static_cast<uint32_t>(XXH3_64bits(tokens.data(), tokens.size_bytes()));
}

// Computes the hash for Dataset::fingerprint(). Checkpoints store this hash, so its definition must not change: the
// first array is hashed, then each further array with the hash so far as its seed.
class Fingerprint {
 public:
  Fingerprint() { XXH3_64bits_reset(state_.get()); }
  void add(const void* data, size_t bytes) { XXH3_64bits_update(state_.get(), data, bytes); }
  void next_array() { XXH3_64bits_reset_withSeed(state_.get(), value()); }
  uint64_t value() const { return XXH3_64bits_digest(state_.get()); }

 private:
  std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state_{XXH3_createState(), &XXH3_freeState};
};

// Reads the array in the file `path`, converts each value from From to To, and adds it to `hash`. The file is read
// block by block, so memory does not grow with its size.
template <class To, class From, class Convert>
void add_converted(Fingerprint& hash, const std::filesystem::path& path, Convert convert) {
  std::ifstream file(path, std::ios::binary);
  std::vector<From> from(size_t{1} << 16);
  std::vector<To> to(from.size());
  while (file) {
    file.read(reinterpret_cast<char*>(from.data()), static_cast<std::streamsize>(from.size() * sizeof(From)));
    const auto count = static_cast<size_t>(file.gcount()) / sizeof(From);
    std::transform(from.begin(), from.begin() + static_cast<std::ptrdiff_t>(count), to.begin(), convert);
    hash.add(to.data(), count * sizeof(To));
  }
  TESSERA_CHECK(file.eof(), ErrorKind::kIo, "[data.cache] {}: cannot be read.", path.string());
}

// Called after open() of the file `path` of a cache entry has failed. Returns if the file is missing (or its path is a
// loop of links); PackedRows::open() then returns null, so that the rows are made again. Any other failure of open() is
// Error kIo.
void check_missing(const std::filesystem::path& path) {
  TESSERA_CHECK(errno == ENOENT || errno == ENOTDIR || errno == ELOOP, ErrorKind::kIo,
                "[data.cache] {}: cannot be opened: {}. If that stays so, set data.cache to another folder.",
                path.string(), std::strerror(errno));
}

}  // namespace

std::string DataStats::describe_dropped(int64_t sequence_length) const {
  std::vector<std::string> parts;
  if (truncated > 0) parts.push_back(fmt::format("{} cut to data.sequence_length {}", truncated, sequence_length));
  if (dropped > 0) {
    parts.push_back(fmt::format("{} longer than data.sequence_length {} dropped", dropped, sequence_length));
  }
  if (unlabelled > 0) {
    parts.push_back(fmt::format("{} left out without anything to learn{}", unlabelled,
                                cut_away > 0 ? fmt::format(" ({} of them because of the cut)", cut_away) : ""));
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

ArrayFile::ArrayFile(std::filesystem::path path) : path_(std::move(path)) {
  file_.reset(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  TESSERA_CHECK(file_.open(), ErrorKind::kIo, "[data.cache] {}: cannot be created: {}", path_.string(),
                std::strerror(errno));
  buffer_.reserve(size_t{1} << 18);
}

void ArrayFile::append(const void* data, size_t bytes) {
  const auto* from = static_cast<const char*>(data);
  if (buffer_.size() + bytes > buffer_.capacity()) flush();
  buffer_.insert(buffer_.end(), from, from + bytes);
  if (buffer_.size() >= size_t{1} << 18) flush();
}

void ArrayFile::flush() {
  for (size_t done = 0; done < buffer_.size();) {
    const ssize_t count = ::write(file_.get(), buffer_.data() + done, buffer_.size() - done);
    if (count < 0 && errno == EINTR) continue;
    TESSERA_CHECK(count > 0, ErrorKind::kIo,
                  "[data.cache] {}: cannot be written: {}. Give data.cache a folder with more room.", path_.string(),
                  std::strerror(errno));
    done += static_cast<size_t>(count);
  }
  buffer_.clear();
}

void ArrayFile::close() {
  flush();
  TESSERA_CHECK(::fsync(file_.get()) == 0, ErrorKind::kIo, "[data.cache] {}: cannot be written: {}", path_.string(),
                std::strerror(errno));
  file_.reset();
}

PackedRowsWriter::PackedRowsWriter(std::filesystem::path folder, const PackingOptions& options)
    : folder_(std::move(folder)), options_(options), tokens_(folder_ / kTokensName), entries_(folder_ / kEntriesName) {}

void PackedRowsWriter::add(std::span<const int32_t> tokens, std::span<const uint8_t> loss_mask) {
  sample_.resize(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    sample_[i].bits = static_cast<uint32_t>(tokens[i]) | (loss_mask[i] ? uint32_t{1} << 31 : 0);
  }
  const SampleEntry entry{token_count_, static_cast<uint32_t>(tokens.size()), hash_of_sample(sample_)};
  tokens_.append(sample_.data(), sample_.size() * sizeof(PackedToken));
  entries_.append(&entry, sizeof(entry));
  token_count_ += tokens.size();
  ++samples_;
}

// First-fit over the rows that are still open. With more than 64 open rows the oldest row is closed, so the cost stays
// linear in the number of samples.
void PackedRowsWriter::pack() {
  constexpr size_t kOpenRows = 64;
  constexpr uint64_t kPackingEpoch = ~uint64_t{0};  // a permutation that no epoch of the loader uses
  const auto limit = static_cast<uint64_t>(options_.sequence_length);
  const auto file = MappedFile::open(folder_ / kEntriesName);
  const auto* entries = reinterpret_cast<const SampleEntry*>(file->bytes().data());
  ArrayFile bounds(folder_ / kBoundsName), order(folder_ / kOrderName);
  struct OpenRow {
    std::vector<uint64_t> samples;
    uint64_t used = 0;
  };
  std::deque<OpenRow> open;
  uint64_t written = 0;
  bounds.append(&written, sizeof(written));
  const auto close_first = [&] {
    const auto& row = open.front();
    order.append(row.samples.data(), row.samples.size() * sizeof(uint64_t));
    written += row.samples.size();
    bounds.append(&written, sizeof(written));
    ++rows_;
    open.pop_front();
  };
  for (int64_t i = 0; i < samples_; ++i) {
    const auto sample =
        static_cast<uint64_t>(options_.shuffle ? permuted_index(i, samples_, options_.seed, kPackingEpoch) : i);
    const uint64_t length = entries[sample].length;
    size_t at = options_.packing ? 0 : open.size();
    while (at < open.size() && open[at].used + length > limit) ++at;
    if (at == open.size()) open.emplace_back();
    open[at].samples.push_back(sample);
    open[at].used += length;
    if (open.size() > kOpenRows) close_first();
  }
  while (!open.empty()) close_first();
  bounds.close();
  order.close();
}

std::string PackedRowsWriter::fingerprint() const {
  Fingerprint hash;
  add_converted<int32_t, PackedToken>(hash, folder_ / kTokensName, [](PackedToken token) { return token.id(); });
  hash.next_array();
  add_converted<uint8_t, PackedToken>(hash, folder_ / kTokensName,
                                      [](PackedToken token) -> uint8_t { return token.has_label(); });
  hash.next_array();
  add_converted<uint64_t, SampleEntry>(hash, folder_ / kEntriesName,
                                       [](const SampleEntry& entry) { return entry.begin; });
  hash.add(&token_count_, sizeof(token_count_));
  for (const char* name : {kOrderName, kBoundsName}) {
    hash.next_array();
    add_converted<uint64_t, uint64_t>(hash, folder_ / name, [](uint64_t value) { return value; });
  }
  hash.next_array();
  hash.add(&options_.sequence_length, sizeof(int64_t));
  return fmt::format("{:016x}", hash.value());
}

void PackedRowsWriter::finish(const std::string& key, const DataStats& stats, int64_t padding_token,
                              const std::vector<std::string>& description) {
  tokens_.close();
  entries_.close();
  pack();
  Json set = {{"version", kSetVersion},
              {"key", key},
              {"sequence_length", options_.sequence_length},
              {"padding_token", padding_token},
              {"rows", rows_},
              {"samples", samples_},
              {"tokens", token_count_},
              {"label_tokens", stats.label_tokens},
              {"truncated", stats.truncated},
              {"dropped", stats.dropped},
              {"unlabelled", stats.unlabelled},
              {"cut_away", stats.cut_away},
              {"fingerprint", fingerprint()},
              {"description", description}};
  // The file names in `description` may hold bytes that are not UTF-8. error_handler_t::replace replaces these bytes;
  // without it dump() would throw.
  publish_file(folder_ / kSetName, set.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

// A PackedRows holds a shared lock on the set.json of its entry, so that the entry is not removed while it is in use.
// Returns null for an entry that is missing, incomplete, being removed, or of another version or key. An entry whose
// files exist but cannot be opened or read is an error, because making the entry again would not help.
std::shared_ptr<const PackedRows> PackedRows::open(const std::filesystem::path& folder, const std::string& key,
                                                   std::string* failure_reason) {
  std::string ignored;
  std::string& reason = failure_reason ? *failure_reason : ignored;
  std::error_code missing;
  if (!std::filesystem::exists(folder, missing)) {
    reason.clear();
    return nullptr;
  }
  auto set = std::shared_ptr<PackedRows>(new PackedRows());
  set->folder_ = folder;
  set->set_file_.reset(::open((folder / kSetName).c_str(), O_RDONLY | O_CLOEXEC));
  if (!set->set_file_.open()) check_missing(folder / kSetName);
  // EWOULDBLOCK means that another process holds the exclusive lock, to remove or replace the entry. On a file system
  // without locks flock() fails with another errno, and the entry is opened without a lock: prune() then cannot lock
  // the entry either, and does not remove it.
  if (set->set_file_.open() && ::flock(set->set_file_.get(), LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    reason = fmt::format("[data.cache] {}: is being removed.", folder.string());
    return nullptr;
  }
  try {
    const auto path = folder / kSetName;
    const Json json = parse_json_object(read_file(path, size_t{16} << 20), "[data.cache] " + path.string());
    const JsonReader top(json, "[data.cache] " + path.string());
    constexpr int64_t kMost = int64_t{1} << 48;
    const auto number = [&](const char* name) { return top.integer(name, std::nullopt, 0, kMost); };
    if (number("version") != kSetVersion) top.at("version").fail("version 1");
    if (top.string("key") != key) top.at("key").fail(key);
    set->rows_ = top.integer("rows", std::nullopt, 1, kMost);
    set->samples_ = number("samples");
    set->token_count_ = static_cast<uint64_t>(number("tokens"));
    set->sequence_length_ = number("sequence_length");
    set->padding_token_ = number("padding_token");
    set->stats_ = {.documents = set->samples_,
                   .tokens = number("tokens"),
                   .label_tokens = number("label_tokens"),
                   .truncated = number("truncated"),
                   .dropped = number("dropped"),
                   .unlabelled = number("unlabelled"),
                   .cut_away = top.integer("cut_away", 0, 0, kMost)};  // entries of earlier versions have none
    set->fingerprint_ = top.string("fingerprint");
    for (const auto& line : top.at("description").items()) set->description_.push_back(line.as_string());
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kIo && set->set_file_.open()) throw;  // set.json exists
    reason = error.what();
    return nullptr;
  }
  const auto open_array = [&](UniqueFd& file, const char* name, uint64_t bytes) {
    file.reset(::open((folder / name).c_str(), O_RDONLY | O_CLOEXEC));
    if (!file.open()) check_missing(folder / name);
    struct stat info {};
    if (file.open() && ::fstat(file.get(), &info) == 0 && static_cast<uint64_t>(info.st_size) == bytes) return true;
    reason = fmt::format("[data.cache] {}: found {} bytes, wanted {}.", (folder / name).string(),
                         file.open() ? info.st_size : 0, bytes);
    return false;
  };
  const auto samples = static_cast<uint64_t>(set->samples_), rows = static_cast<uint64_t>(set->rows_);
  if (!open_array(set->tokens_file_, kTokensName, set->token_count_ * sizeof(PackedToken)) ||
      !open_array(set->entries_file_, kEntriesName, samples * sizeof(SampleEntry)) ||
      !open_array(set->bounds_file_, kBoundsName, (rows + 1) * sizeof(uint64_t)) ||
      !open_array(set->order_file_, kOrderName, samples * sizeof(uint64_t))) {
    return nullptr;
  }
  // Sets the modification time of the file kMakerName, which is the time of the entry's last use. A failure is ignored:
  // the entry may be another user's, or of an earlier version that has no such file.
  static_cast<void>(::utimensat(AT_FDCWD, (folder / kMakerName).c_str(), nullptr, 0));
  return set;
}

void PackedRows::damaged(const std::string& problem) const {
  raise(ErrorKind::kFormat,
        "[data.cache] {}: {}: the rows were damaged after they were written. Remove the folder; it is then made again "
        "from the data.",
        folder_.string(), problem);
}

// Uses pread() instead of a memory map: resident memory does not grow with the bytes read, and a file that became
// shorter is an error instead of a SIGBUS.
void PackedRows::read_at(const UniqueFd& file, const char* name, uint64_t offset, void* data, size_t bytes) const {
  for (size_t done = 0; done < bytes;) {
    const ssize_t count =
        ::pread(file.get(), static_cast<char*>(data) + done, bytes - done, static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    TESSERA_CHECK(count >= 0, ErrorKind::kIo, "[data.cache] {}: cannot be read: {}", (folder_ / name).string(),
                  std::strerror(errno));
    if (count == 0) damaged(fmt::format("{} ends at byte {}", name, offset + done));
    done += static_cast<size_t>(count);
  }
}

// Every number that is read from the files is checked before it is used as a position or size. The hash of each
// sample's tokens is compared with SampleEntry::hash.
void PackedRows::read(int64_t row, const std::function<void(std::span<const PackedToken>)>& visit) const {
  uint64_t bounds[2] = {};
  read_at(bounds_file_, kBoundsName, static_cast<uint64_t>(row) * sizeof(uint64_t), bounds, sizeof(bounds));
  const auto max_tokens = static_cast<uint64_t>(sequence_length_);
  if (bounds[0] > bounds[1] || bounds[1] > static_cast<uint64_t>(samples_) || bounds[1] - bounds[0] > max_tokens) {
    damaged(fmt::format("row {} holds samples {} to {}", row, bounds[0], bounds[1]));
  }
  std::vector<uint64_t> samples(bounds[1] - bounds[0]);
  read_at(order_file_, kOrderName, bounds[0] * sizeof(uint64_t), samples.data(), samples.size() * sizeof(uint64_t));
  std::vector<PackedToken> tokens;
  uint64_t used = 0;
  for (const uint64_t sample : samples) {
    if (sample >= static_cast<uint64_t>(samples_)) damaged(fmt::format("row {} holds sample {}", row, sample));
    SampleEntry entry;
    read_at(entries_file_, kEntriesName, sample * sizeof(entry), &entry, sizeof(entry));
    used += entry.length;
    if (used > max_tokens || entry.begin > token_count_ || entry.length > token_count_ - entry.begin) {
      damaged(fmt::format("sample {} has {} tokens from token {}", sample, entry.length, entry.begin));
    }
    tokens.resize(entry.length);
    read_at(tokens_file_, kTokensName, entry.begin * sizeof(PackedToken), tokens.data(),
            tokens.size() * sizeof(PackedToken));
    if (hash_of_sample(tokens) != entry.hash) damaged(fmt::format("sample {} has another hash", sample));
    visit(tokens);
  }
}

}  // namespace tessera::data
