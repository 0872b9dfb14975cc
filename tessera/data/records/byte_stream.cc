#include "tessera/data/records/byte_stream.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/files/unique_fd.h"

namespace tessera::data {
namespace {

class PlainBytes : public ByteStream {
 public:
  PlainBytes(std::filesystem::path path, UniqueFd file) : path_(std::move(path)), file_(std::move(file)) {}

  size_t read(std::span<char> buffer) override {
    size_t filled = 0;
    while (filled < buffer.size()) {
      const ssize_t count = ::read(file_.get(), buffer.data() + filled, buffer.size() - filled);
      if (count < 0 && errno == EINTR) continue;
      TESSERA_CHECK(count >= 0, ErrorKind::kIo, "[data.read] {}: cannot be read: {}", path_.string(),
                    std::strerror(errno));
      if (count == 0) break;
      filled += static_cast<size_t>(count);
    }
    return filled;
  }

 private:
  std::filesystem::path path_;
  UniqueFd file_;
};

// Inflates gzip. A file may have several gzip members one after another, as concatenated files do; between_members_ is
// true after the end of each. A file that ends inside a member is an error, so a download that was cut off is found.
class GzipBytes : public ByteStream {
 public:
  GzipBytes(std::filesystem::path path, std::unique_ptr<ByteStream> file)
      : path_(std::move(path)), file_(std::move(file)) {
    constexpr int kGzipOnly = 16 + MAX_WBITS;
    TESSERA_CHECK(::inflateInit2(&stream_, kGzipOnly) == Z_OK, ErrorKind::kMemory,
                  "[data.read] {}: no memory to inflate it.", path_.string());
  }
  ~GzipBytes() override { ::inflateEnd(&stream_); }
  GzipBytes(const GzipBytes&) = delete;
  GzipBytes& operator=(const GzipBytes&) = delete;

  size_t read(std::span<char> buffer) override {
    size_t filled = 0;
    while (filled < buffer.size() && !done_) {
      if (stream_.avail_in == 0) refill();
      if (between_members_ && !start_member()) break;
      constexpr size_t kMost = size_t{1} << 30;  // zlib counts in 32 bits
      const size_t wanted = std::min(buffer.size() - filled, kMost);
      stream_.next_out = reinterpret_cast<Bytef*>(buffer.data() + filled);
      stream_.avail_out = static_cast<uInt>(wanted);
      const int result = ::inflate(&stream_, Z_NO_FLUSH);
      filled += wanted - stream_.avail_out;
      if (result == Z_STREAM_END) {
        between_members_ = true;
        continue;
      }
      TESSERA_CHECK(result == Z_OK || result == Z_BUF_ERROR, ErrorKind::kFormat,
                    "[data.read] {}: damaged gzip before its byte {}: {}.", path_.string(), read_,
                    stream_.msg ? stream_.msg : "zlib gives no reason");
      TESSERA_CHECK(stream_.avail_in > 0 || stream_.avail_out == 0 || !ended_, ErrorKind::kFormat,
                    "[data.read] {}: cut off after {} bytes, inside of gzip. Fetch or write it again.", path_.string(),
                    read_);
    }
    return filled;
  }

 private:
  void refill() {
    const size_t count = file_->read(input_);
    read_ += count;
    ended_ = count == 0;
    stream_.next_in = reinterpret_cast<Bytef*>(input_.data());
    stream_.avail_in = static_cast<uInt>(count);
  }

  // Begins the next gzip member. Zeros after a member are skipped. False at the end of the file.
  bool start_member() {
    while (stream_.avail_in > 0 && *stream_.next_in == 0) {
      ++stream_.next_in, --stream_.avail_in;
      if (stream_.avail_in == 0) refill();
    }
    if (stream_.avail_in == 0) {
      done_ = true;
      return false;
    }
    between_members_ = false;
    ::inflateReset(&stream_);
    return true;
  }

  std::filesystem::path path_;
  std::unique_ptr<ByteStream> file_;
  z_stream stream_{};
  std::array<char, size_t{1} << 16> input_;
  uint64_t read_ = 0;  // bytes of the compressed file so far
  bool ended_ = false;
  bool between_members_ = false;
  bool done_ = false;
};

}  // namespace

std::unique_ptr<ByteStream> ByteStream::open(const std::filesystem::path& path) {
  UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  TESSERA_CHECK(file.open(), ErrorKind::kIo, "[data.read] {}: cannot be opened for reading: {}", path.string(),
                std::strerror(errno));
  struct stat info {};
  TESSERA_CHECK(::fstat(file.get(), &info) == 0 && S_ISREG(info.st_mode), ErrorKind::kIo,
                "[data.read] {}: is not a regular file", path.string());
  unsigned char magic[2] = {};
  const bool gzip = ::pread(file.get(), magic, 2, 0) == 2 && magic[0] == 0x1f && magic[1] == 0x8b;
  auto plain = std::make_unique<PlainBytes>(path, std::move(file));
  if (!gzip) return plain;
  return std::make_unique<GzipBytes>(path, std::move(plain));
}

}  // namespace tessera::data
