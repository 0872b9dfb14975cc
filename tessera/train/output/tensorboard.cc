#include "tessera/train/output/tensorboard.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/machine/host.h"
#include "tessera/train/output/crc32c.h"

namespace tessera::train {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are written as they lie in memory");

template <class Number>
void append_raw(std::string& out, Number value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// Protobuf wire format: a field is a varint of (number << 3 | type), then its value.
enum WireType : uint64_t { kVarint = 0, kFixed64 = 1, kLengthDelimited = 2, kFixed32 = 5 };

void append_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}

std::string varint_field(uint64_t number, uint64_t value) {
  std::string out;
  append_varint(out, number << 3 | kVarint);
  append_varint(out, value);
  return out;
}

// A field of type double or float.
template <class Number>
std::string number_field(uint64_t number, Number value) {
  std::string out;
  append_varint(out, number << 3 | (sizeof value == 8 ? kFixed64 : kFixed32));
  append_raw(out, value);
  return out;
}

std::string bytes_field(uint64_t number, std::string_view bytes) {
  std::string out;
  append_varint(out, number << 3 | kLengthDelimited);
  append_varint(out, bytes.size());
  return out.append(bytes);
}

double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Field `summary` of an Event with one Value in it.
std::string summary_field(const std::string& value) { return bytes_field(5, bytes_field(1, value)); }

}  // namespace

TensorBoardWriter::TensorBoardWriter(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  TESSERA_CHECK(!error, ErrorKind::kIo, "[train.tensorboard] {}: {}", folder.string(), error.message());
  // The file name has the time before all other varying parts, because TensorBoard reads the files of a folder in the
  // order of their names.
  static std::atomic<int> count{0};
  path_ = folder / fmt::format("events.out.tfevents.{}.{}.{}.{}", static_cast<int64_t>(wall_time()), host_name(),
                               ::getpid(), count++);
  file_.reset(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_APPEND, 0644));
  TESSERA_CHECK(file_.open(), ErrorKind::kIo, "[train.tensorboard] {}: {}", path_.string(), std::strerror(errno));
  add_event(0, bytes_field(3, "brain.Event:2"));
  flush();
}

TensorBoardWriter::~TensorBoardWriter() {
  try {
    flush();
  } catch (const Error& error) {
    log_warning("{}", error.what());
  }
}

void TensorBoardWriter::start_session(int64_t step) {
  // When TensorBoard reads the start of a session, it drops all earlier events whose step is not below the step of the
  // start event.
  constexpr uint64_t kStart = 1;  // SessionLog.SessionStatus
  add_event(step + 1, bytes_field(7, varint_field(1, kStart)));
}

void TensorBoardWriter::add_scalar(std::string_view tag, double value, int64_t step) {
  add_event(step, summary_field(bytes_field(1, tag) + number_field(2, static_cast<float>(value))));
}

void TensorBoardWriter::add_text(std::string_view tag, std::string_view text, int64_t step) {
  constexpr uint64_t kString = 7;                                // DataType.DT_STRING
  constexpr uint64_t kTensorClass = 2;                           // DataClass.DATA_CLASS_TENSOR
  const std::string shape = bytes_field(2, varint_field(1, 1));  // TensorShapeProto: one dim of size 1
  const std::string tensor = varint_field(1, kString) + bytes_field(2, shape) + bytes_field(8, text);
  const std::string metadata = bytes_field(1, bytes_field(1, "text")) + varint_field(4, kTensorClass);
  add_event(step, summary_field(bytes_field(1, tag) + bytes_field(8, tensor) + bytes_field(9, metadata)));
}

void TensorBoardWriter::add_event(int64_t step, std::string_view body) {
  // tensorflow.Event: wall_time 1, step 2, file_version 3, summary 5, session_log 7.
  // The record is collected in memory and written by flush(): one write for the scalars of a step.
  const std::string event =
      number_field(1, wall_time()) + varint_field(2, static_cast<uint64_t>(step)) + std::string(body);
  std::string length;
  append_raw(length, static_cast<uint64_t>(event.size()));
  pending_ += length;
  append_raw(pending_, masked_crc32c(length));
  pending_ += event;
  append_raw(pending_, masked_crc32c(event));
}

// After a partial write only the rest stays pending: a later flush continues in the middle of the record, and the file
// stays valid.
void TensorBoardWriter::flush() {
  size_t done = 0;
  while (done < pending_.size()) {
    const ssize_t step = ::write(file_.get(), pending_.data() + done, pending_.size() - done);
    if (step < 0 && errno == EINTR) continue;
    if (step <= 0) {
      pending_.erase(0, done);
      raise(ErrorKind::kIo, "[train.tensorboard] {}: cannot be written: {}. Make room, or set log.tensorboard=false.",
            path_.string(), std::strerror(errno));
    }
    done += static_cast<size_t>(step);
  }
  pending_.clear();
}

}  // namespace tessera::train
