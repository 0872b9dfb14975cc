// Writes TensorBoard event files: scalars and texts for `tensorboard --logdir`.
//
//   TensorBoardWriter events(run / "tensorboard");
//   events.start_session(resumed_step);            // TensorBoard drops older events after that step
//   events.add_scalar("train/loss", 2.1, 7);
//   events.flush();
//
// Each record is a protobuf message tensorflow.Event, encoded by hand, in TFRecord framing (length, masked CRC-32C of
// the length, data, masked CRC-32C of the data; little-endian): docs/format/tensorboard.md. Not thread-safe.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "tessera/base/files/unique_fd.h"

namespace tessera::train {

class TensorBoardWriter {
 public:
  // Creates the folder and a new file events.out.tfevents.* in it. Error kIo.
  explicit TensorBoardWriter(const std::filesystem::path& folder);
  ~TensorBoardWriter();  // flushes; an error is logged
  TensorBoardWriter(const TensorBoardWriter&) = delete;
  TensorBoardWriter& operator=(const TensorBoardWriter&) = delete;

  // Makes TensorBoard ignore events of steps after `step` in earlier files of the folder.
  void start_session(int64_t step);
  // NaN and infinities are written as they are; TensorBoard marks them.
  void add_scalar(std::string_view tag, double value, int64_t step);
  // TensorBoard shows the text as Markdown under TEXT.
  void add_text(std::string_view tag, std::string_view text, int64_t step);
  // Writes all events that were added since the last flush. Error kIo.
  void flush();

  const std::filesystem::path& path() const { return path_; }

 private:
  void add_event(int64_t step, std::string_view body);

  std::filesystem::path path_;
  UniqueFd file_;
  std::string pending_;
};

}  // namespace tessera::train
