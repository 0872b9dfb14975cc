// Layout of the shared memory of a group. All processes must be of one build; `version` detects other builds.
//
//   head | words of each rank | rings | chunks of send and recv | slots: rank 0 even, rank 0 odd, rank 1 even, ...
//
// A rank has one slot for even and one for odd rounds (rounds.h). Only rank r writes the slots of rank r, between two
// rounds.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/comm/group/signature.h"
#include "tessera/comm/shm/futex_platform.h"
#include "tessera/comm/shm/shared_buffer.h"

namespace tessera::comm::shm {

inline constexpr uint64_t kVersion = 4;
inline constexpr size_t kReasonBytes = 400;

// The fields of a call that must be equal on all ranks for the memory accesses to be safe. They are compared in every
// call, also when no Signature was announced.
struct CallDescriptor {
  Op kind = Op::kNone;
  int8_t dtype = -1;   // c10::ScalarType; -1: bytes or none
  uint8_t reduce = 0;  // c10d::ReduceOp::RedOpType
  uint8_t unused = 0;
  int32_t root = -1;
  uint64_t elements = 0;  // of the tensor or of each message; 0 where ranks may differ
  bool operator==(const CallDescriptor&) const = default;
};

struct SlotHead {
  CallDescriptor call;
  Signature signature;  // hash 0: none was announced
  uint64_t longest;     // bytes of this rank's longest message in this call, including its message to itself
  uint64_t outgoing;    // bytes of its longest message to another rank
  uint64_t direct;      // 1: its messages to other ranks are read in place, from the rank's own memory
};

// The place of a message that can be read in the sender's memory.
struct MessagePlace {
  uint64_t address = 0;      // for threads of the same process
  SharedBufferPlace shared;  // for other processes
};

// The slot of rank r contains a table after its SlotHead. Entry d of the table describes two messages: the one from
// rank r to rank d and the one from rank d to rank r.
struct MessageEntry {
  uint64_t bytes;           // that rank r sends to rank d
  uint64_t expected_bytes;  // that rank r expects from rank d
  MessagePlace place;       // of the message to rank d; only when SlotHead::direct is 1
};

// The words in shared memory that describe one rank's state.
struct RankWords {
  alignas(64) Native::Word64 arrived{};  // number of the rank's present round, for error texts and left_rank_name()
  Native::Word32 left{};                 // 1: the rank has left the group
  InPlaceReaderCount<Native> readers;    // reads of other ranks' memory that are under way in this rank
  RankEventCounts<Native> bells;         // rung when a round is complete, and for each chunk that is put or taken
};

// Header of one chunk of a message. The chunk's data follows the header, unless `address` is set. The chunks from one
// rank to another form a ring (Ring).
struct ChunkHead {
  uint64_t message_bytes;
  uint64_t offset;   // of this chunk in the message
  uint64_t bytes;    // of this chunk
  uint64_t address;  // not 0: the whole message is read at this address (threads of one process)
  int64_t tag;
};

// Why a group was aborted.
enum class AbortReason : uint32_t { kPeerFailed, kDisagreement, kTimedOut };

struct Head {
  uint64_t version = kVersion;
  RoundWords<Native> rounds;
  Native::Word32 breaking{};  // not 0: a rank writes `kind` and `reason`; they are valid once rounds.broken is set
  AbortReason kind = AbortReason::kPeerFailed;
  char reason[kReasonBytes] = {};
};

class Layout {
 public:
  explicit Layout(int size) : size_(static_cast<size_t>(size)) {
    slot_data_ = size <= 4 ? 512 * 1024 : size <= 16 ? 256 * 1024 : 64 * 1024;
    chunk_data_ = size <= 4 ? 64 * 1024 : size <= 16 ? 16 * 1024 : 1024;
    table_ = up(sizeof(SlotHead));
    slot_head_ = up(table_ + size_ * sizeof(MessageEntry));
    words_ = up(sizeof(Head));
    rings_ = words_ + size_ * sizeof(RankWords);
    chunks_ = rings_ + size_ * size_ * sizeof(Ring<Native>);
    slots_ = page(chunks_ + size_ * size_ * Ring<Native>::kChunks * chunk_bytes());
  }
  size_t bytes() const { return slots_ + size_ * 2 * slot_bytes(); }
  size_t slot_data() const { return slot_data_; }
  size_t chunk_data() const { return chunk_data_; }

  size_t words(int rank) const { return words_ + rank * sizeof(RankWords); }
  size_t ring(int from, int to) const { return rings_ + (from * size_ + to) * sizeof(Ring<Native>); }
  size_t chunk(int from, int to, uint64_t number) const {
    return chunks_ + ((from * size_ + to) * Ring<Native>::kChunks + number % Ring<Native>::kChunks) * chunk_bytes();
  }
  size_t slot(int rank, uint64_t round) const { return slots_ + (rank * 2 + round % 2) * slot_bytes(); }
  size_t table() const { return table_; }          // offset of the table in a slot
  size_t slot_head() const { return slot_head_; }  // bytes in front of a slot's data
  static size_t chunk_head() { return up(sizeof(ChunkHead)); }

 private:
  static size_t up(size_t bytes) { return (bytes + 63) / 64 * 64; }
  static size_t page(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }
  size_t slot_bytes() const { return page(slot_head_ + slot_data_); }
  size_t chunk_bytes() const { return chunk_head() + chunk_data_; }

  size_t size_, slot_data_, chunk_data_, table_, slot_head_, words_, rings_, chunks_, slots_;
};

}  // namespace tessera::comm::shm
