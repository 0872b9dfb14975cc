// What lies where in the memory of a group. All processes are of one build; `version` catches those that are not.
//
//   head | words of each rank | rings and chunks of send and recv | slots: rank 0 even, rank 0 odd, rank 1 even,
//   ...
//
// Slots belong to the round protocol (rounds.h): rank r alone writes its slots, between two rounds.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/comm/group/signature.h"
#include "tessera/comm/shm/native.h"
#include "tessera/comm/shm/shared_buffer.h"

namespace tessera::comm::shm {

inline constexpr uint64_t kVersion = 4;
inline constexpr size_t kReasonBytes = 400;

// What must agree in a call for memory to be safe, whoever made it.
struct Call {
  Op kind = Op::kNone;
  int8_t dtype = -1;   // c10::ScalarType; -1: bytes or none
  uint8_t reduce = 0;  // c10d::ReduceOp::RedOpType
  uint8_t unused = 0;
  int32_t root = -1;
  uint64_t elements = 0;  // of each message; 0 where ranks may differ
  bool operator==(const Call&) const = default;
};

struct SlotHead {
  Call call;
  Signature signature;  // hash 0: none was announced
  uint64_t longest;     // bytes of the longest message of this rank in this call, to itself too
  uint64_t outgoing;    // and of the longest to another rank
  uint64_t direct;      // 1: those are read where they are
};

// Where a message can be read.
struct Place {
  uint64_t address = 0;  // by threads of the same process
  SharedPlace shared;    // by other processes
};

// What rank r sends to rank d, and wants from it: entry d of the table behind r's head.
struct Message {
  uint64_t bytes;
  uint64_t wanted;
  Place place;  // when read where it is
};

// The words of one rank.
struct RankWords {
  alignas(64) Native::Word64 arrived{};  // its round, for errors
  Native::Word32 left{};                 // 1: it has ended this group
  Readers<Native> readers;               // of other ranks' memory in place
  Bells<Native> bells;                   // rung when a round is complete, and for each chunk that is put or taken
};

// A chunk of a message, in the ring from one rank to another.
struct ChunkHead {
  uint64_t message_bytes;
  uint64_t offset;
  uint64_t bytes;    // in this chunk
  uint64_t address;  // not 0: the whole message is read there
  int64_t tag;
};

// Why a group was broken off.
enum class Broken : uint32_t { kPeerFailed, kDisagreement, kTimedOut };

struct Head {
  uint64_t version = kVersion;
  RoundWords<Native> rounds;
  Native::Word32 breaking{};  // 1: someone writes what follows, which is read when rounds.broken is set
  Broken kind = Broken::kPeerFailed;
  char reason[kReasonBytes] = {};
};

class Layout {
 public:
  explicit Layout(int size) : size_(static_cast<size_t>(size)) {
    slot_data_ = size <= 4 ? 512 * 1024 : size <= 16 ? 256 * 1024 : 64 * 1024;
    chunk_data_ = size <= 4 ? 64 * 1024 : size <= 16 ? 16 * 1024 : 1024;
    table_ = up(sizeof(SlotHead));
    slot_head_ = up(table_ + size_ * sizeof(Message));
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
  size_t table() const { return table_; }          // in a slot
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
