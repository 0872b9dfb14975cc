// Clocks, memory blocks and graph captures of the pretend devices, and the checks of the order of accesses (order.h).
#include "tests/support/pretend_device/order.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <set>

#include "tests/support/pretend_device/memory.h"

namespace tessera::pretend {
namespace {

constexpr size_t kBlockAlignment = 512;
// After this many further launches on a stream, its earlier work counts as done, because a real device would also have
// progressed.
constexpr uint64_t kSoonDone = 256;
// With this many launches behind an event, the device has work for a longer time than a waiting host needs to wake up.
constexpr uint64_t kKeepsBusy = 64;

struct Access {
  size_t begin, end;  // offsets in the block
  int stream;
  bool writes;
  uint64_t time;
  const char* name;
};

struct Block {
  Block(std::byte* at, size_t size, int owner) : address(at), bytes(size), stream(owner) {}
  std::byte* address;
  size_t bytes;
  size_t counted = 0;  // bytes of the request; caching allocators split off the rest
  int stream;
  bool freed = false;
  std::vector<Access> accesses;
  std::array<bool, kStreams> recorded{};
  Moment free_after{};  // moment at which a waiting block becomes idle
  uint64_t freed_at = 0;
  uint64_t pool = 0;  // pool of graphs; 0: none
};

// A range of memory with its earlier values.
struct Bytes {
  std::byte* place;
  std::vector<std::byte> values;
};

struct Capture {
  uint64_t pool = 0;
  std::vector<Kernel> kernels;
  std::set<Block*> taken;  // since the capture began
  std::vector<Bytes> before;
};

struct Pool {
  int64_t graphs = 0;
  std::multimap<size_t, Block*> idle;
};

struct Delivery {
  int stream;
  uint64_t time;
  at::Tensor host;
  at::Tensor values;  // the values that `host` gets at `time`, or must keep until then
  bool writes;
};

struct Device {
  std::mutex mutex;
  std::array<Moment, kStreams> clocks{};
  Moment completed{};  // moment that the host has seen
  std::map<const std::byte*, std::unique_ptr<Block>> blocks;
  std::multimap<std::pair<int, size_t>, Block*> idle;  // by stream and size
  std::list<Block*> waiting;
  std::vector<Delivery> deliveries;
  Counters counters;
  std::vector<std::string> syncs;
  std::vector<Launch> launches;
  std::atomic<unsigned> next_normal = 0, next_high = 0;
  std::array<std::unique_ptr<Capture>, kStreams> captures;
  std::map<uint64_t, Pool> pools;
};

thread_local int captures_on = -1;  // the device on which this thread captures

Device& device_at(int index) {
  static auto* const devices = new std::array<Device, kDevices>;
  TORCH_CHECK(index >= 0 && index < kDevices, "[pretend] device ", index, " of ", kDevices);
  return (*devices)[static_cast<size_t>(index)];
}

std::atomic<bool> keeps_names = false;

struct Faults {
  std::mutex mutex;
  std::vector<std::string> texts;
};
Faults& faults() {
  static auto* const instance = new Faults;
  return *instance;
}

void join(Moment& own, const Moment& other) {
  for (size_t i = 0; i < own.size(); ++i) own[i] = std::max(own[i], other[i]);
}

int number_of(c10::Stream stream) { return static_cast<int>(stream.id()); }

Block& block_at(Device& device, const void* address, const char* name, bool may_be_freed = false) {
  const auto* const place = static_cast<const std::byte*>(address);
  auto found = device.blocks.upper_bound(place);
  TORCH_CHECK(found != device.blocks.begin(), "[pretend] ", name, ": an address that no block has");
  Block& block = *(--found)->second;
  TORCH_CHECK(place < block.address + block.bytes, "[pretend] ", name, ": an address behind its block");
  TORCH_CHECK(may_be_freed || !block.freed, "[pretend] ", name, ": the block of ", block.bytes,
              " bytes was freed already");
  return block;
}

const char* verb(bool writes) { return writes ? "writes" : "reads"; }

void check(const Block& block, const Access& next, const Moment& clock, int device) {
  for (const Access& before : block.accesses) {
    if (!(before.writes || next.writes) || before.end <= next.begin || next.end <= before.begin) continue;
    if (before.time <= clock[static_cast<size_t>(before.stream)]) continue;
    TORCH_CHECK(false, "[pretend] race on device ", device, ": ", next.name, " on stream ", next.stream, " ",
                verb(next.writes), " bytes ", next.begin, " to ", next.end, " of a block of ", block.bytes, ", which ",
                before.name, " on stream ", before.stream, " (its launch ", before.time, ") ", verb(before.writes),
                " and nothing orders the two. Let stream ", next.stream, " wait for an event of stream ", before.stream,
                ".");
  }
}

// Drops earlier accesses that are ordered before `next` and that `next` covers.
void remember(Block& block, const Access& next, const Moment& clock) {
  std::erase_if(block.accesses, [&](const Access& before) {
    return next.begin <= before.begin && before.end <= next.end && (next.writes || !before.writes) &&
           before.time <= clock[static_cast<size_t>(before.stream)];
  });
  block.accesses.push_back(next);
}

void see(Device& device, int index, const Moment& moment) {
  join(device.completed, moment);
  std::vector<Delivery> due;
  std::erase_if(device.deliveries, [&](Delivery& each) {
    if (each.time > device.completed[static_cast<size_t>(each.stream)]) return false;
    due.push_back(std::move(each));
    return true;
  });
  for (const Delivery& each : due) {
    if (each.writes) {
      std::memcpy(each.host.mutable_data_ptr(), each.values.const_data_ptr(), each.host.nbytes());
    } else if (std::memcmp(each.host.const_data_ptr(), each.values.const_data_ptr(), each.host.nbytes()) != 0) {
      add_fault(
          fmt::format("[pretend] device {}: {} bytes of pinned memory were overwritten before stream {} had "
                      "copied them. Wait for an event behind the copy.",
                      index, each.host.nbytes(), each.stream));
    }
  }
}

void refuse_wait(int device, const char* name) {
  TORCH_CHECK(captures_on != device, "[pretend] ", name, " makes the host wait while a graph is captured");
}

void waits(Device& device, const char* name) {
  ++device.counters.host_syncs;
  if (keeps_names) device.syncs.emplace_back(name);
}

Block* take_idle(Device& device, int stream, size_t bytes) {
  device.waiting.remove_if([&](Block* block) {
    const Moment& own = device.clocks[static_cast<size_t>(block->stream)];
    const bool late = own[static_cast<size_t>(block->stream)] > block->freed_at + kSoonDone;
    for (size_t i = 0; i < kStreams && !late; ++i) {
      if (block->free_after[i] > std::max(own[i], device.completed[i])) return false;
    }
    device.idle.emplace(std::pair(block->stream, block->bytes), block);
    return true;
  });
  const auto found = device.idle.lower_bound({stream, bytes});
  if (found == device.idle.end() || found->first.first != stream) return nullptr;
  Block* const block = found->second;
  if (block->bytes > 2 * bytes + kBlockAlignment) return nullptr;
  device.idle.erase(found);
  return block;
}

Block* take_pooled(Device& device, Capture& capture, size_t bytes) {
  auto& idle = device.pools[capture.pool].idle;
  const auto found = idle.lower_bound(bytes);
  if (found == idle.end() || found->first > 2 * bytes + kBlockAlignment) return nullptr;
  Block* const block = found->second;
  idle.erase(found);
  return block;
}

// The block becomes idle for all streams once each stream has passed its current moment.
void free_behind_all(Device& device, Block& block) {
  block.pool = 0;
  block.free_after = {};
  for (const Moment& clock : device.clocks) join(block.free_after, clock);
  device.waiting.push_back(&block);
}

Touch whole_block(const Block& block) { return {block.address, block.bytes, true}; }

}  // namespace

Counters Counters::operator-(const Counters& before) const {
  return {.launches = launches - before.launches,
          .host_syncs = host_syncs - before.host_syncs,
          .copies_to_host = copies_to_host - before.copies_to_host,
          .copies_to_device = copies_to_device - before.copies_to_device,
          .pageable_copies = pageable_copies - before.pageable_copies,
          .collectives = collectives - before.collectives,
          .allocations = allocations - before.allocations,
          .segments = segments - before.segments,
          .bytes = bytes - before.bytes,
          .peak_bytes = peak_bytes - before.peak_bytes};
}

Counters counters(int device) {
  Device& state = device_at(device);
  const std::lock_guard lock(state.mutex);
  return state.counters;
}

void keep_names(bool keep) { keeps_names = keep; }

std::vector<std::string> take_sync_names(int device) {
  Device& state = device_at(device);
  const std::lock_guard lock(state.mutex);
  return std::exchange(state.syncs, {});
}

std::vector<Launch> take_launches(int device) {
  Device& state = device_at(device);
  const std::lock_guard lock(state.mutex);
  return std::exchange(state.launches, {});
}

std::vector<std::string> take_faults() {
  const std::lock_guard lock(faults().mutex);
  return std::exchange(faults().texts, {});
}

void add_fault(std::string text) noexcept {
  std::fprintf(stderr, "%s\n", text.c_str());
  const std::lock_guard lock(faults().mutex);
  faults().texts.push_back(std::move(text));
}

void add_touch(std::vector<Touch>& touches, const at::Tensor& tensor, bool writes) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  size_t elements = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    elements += static_cast<size_t>((tensor.size(dim) - 1) * tensor.stride(dim));
  }
  touches.push_back({static_cast<const std::byte*>(tensor.storage().data()) +
                         static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize(),
                     elements * tensor.itemsize(), writes});
}

c10::Stream next_stream(c10::DeviceIndex device, bool high_priority) {
  Device& state = device_at(device);
  return high_priority ? stream_of(device, static_cast<int>(kFirstOfHighPriority + state.next_high++ % 32))
                       : stream_of(device, static_cast<int>(1 + state.next_normal++ % 31));
}

c10::Stream stream_of(c10::DeviceIndex device, int number) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, device), number);
}

namespace {

// Checks all touches with their blocks, then stores them.
Moment launch_locked(Device& device, int index, int own, const char* name,
                     const std::vector<std::pair<Touch, Block*>>& touches, uint64_t kernels = 1) {
  Moment& clock = device.clocks[static_cast<size_t>(own)];
  join(clock, device.completed);
  const uint64_t time = clock[static_cast<size_t>(own)] += kernels;  // launches count as work of the device
  ++device.counters.launches;
  if (keeps_names) device.launches.push_back({name, own, clock});
  const auto access = [&](const Touch& touch, const Block& block) {
    const auto begin = static_cast<size_t>(static_cast<const std::byte*>(touch.begin) - block.address);
    return Access{begin, begin + touch.bytes, own, touch.writes, time, name};
  };
  for (const auto& [touch, block] : touches) check(*block, access(touch, *block), clock, index);
  for (const auto& [touch, block] : touches) remember(*block, access(touch, *block), clock);
  return clock;
}

Block& touched_block(Device& device, int index, const Touch& touch, const char* name, bool may_be_freed = false) {
  TORCH_CHECK(device_of(touch.begin) == index, "[pretend] ", name, " on device ", index, ": memory of device ",
              device_of(touch.begin));
  return block_at(device, touch.begin, name, may_be_freed);
}

// The block of a launch or a replay. Memory that a graph freed during its capture may be read directly after its
// replay.
Block& launched_block(Device& device, int index, const Touch& touch, const char* name) {
  Block& block = touched_block(device, index, touch, name, /*may_be_freed=*/true);
  return block.pool != 0 ? block : touched_block(device, index, touch, name);
}

}  // namespace

Moment launch(c10::Stream stream, const char* name, const std::vector<Touch>& touches) {
  refuse_capture(stream, name);
  const int index = stream.device_index();
  Device& device = device_at(index);
  const std::lock_guard lock(device.mutex);
  std::vector<std::pair<Touch, Block*>> in_blocks;
  for (const Touch& touch : touches) in_blocks.emplace_back(touch, &launched_block(device, index, touch, name));
  return launch_locked(device, index, number_of(stream), name, in_blocks);
}

bool captures(c10::Stream stream) {
  Device& device = device_at(stream.device_index());
  const std::lock_guard lock(device.mutex);
  return device.captures[static_cast<size_t>(number_of(stream))] != nullptr;
}

void refuse_capture(c10::Stream stream, const char* name) {
  TORCH_CHECK(!captures(stream), "[pretend] ", name, " while a graph is captured: a graph cannot hold it");
}

void prepare(c10::Stream stream, const char* name, const std::vector<Touch>& touches) {
  const int index = stream.device_index();
  Device& device = device_at(index);
  {
    const std::lock_guard lock(device.mutex);
    if (auto* const capture = device.captures[static_cast<size_t>(number_of(stream))].get()) {
      for (const Touch& touch : touches) {
        Block& block = touched_block(device, index, touch, name);
        if (!touch.writes || capture->taken.contains(&block)) continue;
        auto* const place = static_cast<std::byte*>(shadow(touch.begin));
        capture->before.push_back({place, std::vector<std::byte>(place, place + touch.bytes)});
      }
      return;
    }
  }
  launch(stream, name, touches);
}

void keep(c10::Stream stream, const char* name, const std::vector<Touch>& touches, std::function<void()> run) {
  Device& device = device_at(stream.device_index());
  const std::lock_guard lock(device.mutex);
  if (auto* const capture = device.captures[static_cast<size_t>(number_of(stream))].get()) {
    capture->kernels.push_back({name, touches, std::move(run)});
  }
}

void run(c10::Stream stream, const char* name, const std::vector<Touch>& touches, std::function<void()> kernel) {
  prepare(stream, name, touches);
  kernel();
  keep(stream, name, touches, std::move(kernel));
}

uint64_t new_pool() {
  static std::atomic<uint64_t> last = 0;
  return ++last;
}

void join_pool(int device, uint64_t pool) {
  Device& state = device_at(device);
  const std::lock_guard lock(state.mutex);
  ++state.pools[pool].graphs;
}

void leave_pool(int device, uint64_t pool) noexcept {
  Device& state = device_at(device);
  const std::lock_guard lock(state.mutex);
  if (--state.pools[pool].graphs > 0) return;
  for (const auto& [bytes, block] : state.pools[pool].idle) free_behind_all(state, *block);
  state.pools.erase(pool);
}

void begin_capture(c10::Stream stream, uint64_t pool) {
  Device& device = device_at(stream.device_index());
  const std::lock_guard lock(device.mutex);
  auto& capture = device.captures[static_cast<size_t>(number_of(stream))];
  TORCH_CHECK(number_of(stream) != 0, "[pretend] a graph of the default stream. Capture on another one.");
  TORCH_CHECK(!capture && captures_on < 0, "[pretend] a graph is captured already");
  capture = std::make_unique<Capture>();
  capture->pool = pool;
  captures_on = stream.device_index();
}

std::vector<Kernel> end_capture(c10::Stream stream) {
  Device& device = device_at(stream.device_index());
  const std::lock_guard lock(device.mutex);
  const auto capture = std::move(device.captures[static_cast<size_t>(number_of(stream))]);
  TORCH_CHECK(capture, "[pretend] no graph is captured");
  captures_on = -1;
  for (auto each = capture->before.rbegin(); each != capture->before.rend(); ++each) {
    std::memcpy(each->place, each->values.data(), each->values.size());
  }
  for (const Block* block : capture->taken) std::memset(shadow(block->address), kRubbish, block->bytes);
  return std::move(capture->kernels);
}

void replay(c10::Stream stream, const std::vector<Kernel>& kernels) {
  refuse_capture(stream, "replay");
  const int index = stream.device_index();
  Device& device = device_at(index);
  {
    const std::lock_guard lock(device.mutex);
    std::vector<std::pair<Touch, Block*>> outside;
    std::set<Block*> own;
    for (const Kernel& kernel : kernels) {
      for (const Touch& touch : kernel.touches) {
        Block& block = launched_block(device, index, touch, kernel.name);
        if (block.pool != 0) {
          own.insert(&block);
        } else {
          outside.emplace_back(touch, &block);
        }
      }
    }
    for (Block* block : own) outside.emplace_back(whole_block(*block), block);
    launch_locked(device, index, number_of(stream), "graph", outside, kernels.size());
  }
  for (const Kernel& kernel : kernels) kernel.run();
}

void run_on(const char* name, const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& written,
            std::function<void()> kernel) {
  std::vector<Touch> touches;
  for (const auto& tensor : read) add_touch(touches, tensor, false);
  for (const auto& tensor : written) add_touch(touches, tensor, true);
  run(current_stream(read.front().device().index()), name, touches, std::move(kernel));
}

Moment now(c10::Stream stream) {
  Device& device = device_at(stream.device_index());
  const std::lock_guard lock(device.mutex);
  return device.clocks[static_cast<size_t>(number_of(stream))];
}

bool host_has_seen(c10::Stream stream) {
  Device& device = device_at(stream.device_index());
  const std::lock_guard lock(device.mutex);
  const auto own = static_cast<size_t>(number_of(stream));
  return device.completed[own] >= device.clocks[own][own];
}

void wait_for(c10::Stream stream, const Moment& moment) {
  Device& device = device_at(stream.device_index());
  const std::lock_guard lock(device.mutex);
  join(device.clocks[static_cast<size_t>(number_of(stream))], moment);
}

void host_wait(int device, const Moment& moment, const char* name) {
  refuse_wait(device, name);
  Device& state = device_at(device);
  const std::lock_guard lock(state.mutex);
  waits(state, name);
  see(state, device, moment);
}

void host_wait_event(c10::Stream stream, const Moment& moment, const char* name) {
  refuse_wait(stream.device_index(), name);
  Device& state = device_at(stream.device_index());
  const std::lock_guard lock(state.mutex);
  const auto own = static_cast<size_t>(number_of(stream));
  if (state.clocks[own][own] <= moment[own] + kKeepsBusy) waits(state, name);
  see(state, stream.device_index(), moment);
}

void host_wait(c10::Stream stream, const char* name) { host_wait(stream.device_index(), now(stream), name); }

void host_wait_device(int device, const char* name) {
  refuse_wait(device, name);
  Device& state = device_at(device);
  const std::lock_guard lock(state.mutex);
  waits(state, name);
  Moment all{};
  for (const Moment& clock : state.clocks) join(all, clock);
  see(state, device, all);
}

void deliver_after(c10::Stream stream, const Moment& moment, const at::Tensor& target, const at::Tensor& values) {
  Device& device = device_at(stream.device_index());
  const std::lock_guard lock(device.mutex);
  std::memset(target.mutable_data_ptr(), kRubbish, target.nbytes());
  device.deliveries.push_back(
      {number_of(stream), moment[static_cast<size_t>(number_of(stream))], target, values, true});
}

void watch_until(c10::Stream stream, const Moment& moment, const at::Tensor& source) {
  Device& device = device_at(stream.device_index());
  const std::lock_guard lock(device.mutex);
  device.deliveries.push_back(
      {number_of(stream), moment[static_cast<size_t>(number_of(stream))], source, source.clone(), false});
}

void* take_block(c10::Stream stream, size_t bytes) {
  const int index = stream.device_index(), own = number_of(stream);
  const size_t whole = (bytes + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
  Device& device = device_at(index);
  const std::lock_guard lock(device.mutex);
  auto* const capture = device.captures[static_cast<size_t>(own)].get();
  Block* block = capture ? take_pooled(device, *capture, whole) : take_idle(device, own, whole);
  if (!block) {
    std::byte* const address = reserve(index, whole);
    block = (device.blocks[address] = std::make_unique<Block>(address, whole, own)).get();
    ++device.counters.segments;
  }
  block->freed = false;
  block->counted = whole;
  block->recorded = {};
  block->accesses = {{0, block->bytes, own, true, device.clocks[static_cast<size_t>(own)][static_cast<size_t>(own)],
                      "its allocation"}};
  if (capture) {
    block->pool = capture->pool;
    block->accesses.clear();
    capture->taken.insert(block);
  }
  ++device.counters.allocations;
  device.counters.bytes += static_cast<int64_t>(block->counted);
  device.counters.peak_bytes = std::max(device.counters.peak_bytes, device.counters.bytes);
  return block->address;
}

void release_block(void* address) noexcept {
  const int index = device_of(address);
  if (index < 0) return;
  Device& device = device_at(index);
  const std::lock_guard lock(device.mutex);
  Block& block = *device.blocks.at(static_cast<std::byte*>(address));
  if (block.pool != 0) {
    std::memset(shadow(block.address), kRubbish, block.bytes);
    device.counters.bytes -= static_cast<int64_t>(block.counted);
    block.freed = true;
    const auto found = device.pools.find(block.pool);
    if (found == device.pools.end()) return free_behind_all(device, block);
    found->second.idle.emplace(block.bytes, &block);
    return;
  }
  Moment own = device.clocks[static_cast<size_t>(block.stream)];
  join(own, device.completed);
  block.free_after = {};
  bool waits = false;
  for (size_t stream = 0; stream < kStreams; ++stream) {
    if (!block.recorded[stream]) continue;
    join(block.free_after, device.clocks[stream]);
    waits = waits || device.clocks[stream][stream] > own[stream];
  }
  for (const Access& access : block.accesses) {
    const auto stream = static_cast<size_t>(access.stream);
    if (access.time <= own[stream] || block.recorded[stream]) continue;
    add_fault(fmt::format(
        "[pretend] device {}: a block of {} bytes of stream {} is freed, but {} on stream {} (its "
        "launch {}) {} it and nothing orders the two. Call record_stream, or let stream {} wait.",
        index, block.bytes, block.stream, access.name, access.stream, access.time, verb(access.writes), block.stream));
    break;
  }
  std::memset(shadow(block.address), kRubbish, block.bytes);
  device.counters.bytes -= static_cast<int64_t>(block.counted);
  block.freed = true;
  block.freed_at = device.clocks[static_cast<size_t>(block.stream)][static_cast<size_t>(block.stream)];
  if (waits) {
    device.waiting.push_back(&block);
  } else {
    device.idle.emplace(std::pair(block.stream, block.bytes), &block);
  }
}

void record_block(const void* address, c10::Stream stream) {
  if (address == nullptr) return;
  Device& device = device_at(stream.device_index());
  const std::lock_guard lock(device.mutex);
  Block& block = block_at(device, address, "record_stream");
  if (block.stream != number_of(stream)) block.recorded[static_cast<size_t>(number_of(stream))] = true;
}

void forget_idle_blocks(int device) {
  Device& state = device_at(device);
  const std::lock_guard lock(state.mutex);
  if (state.idle.empty()) return;
  waits(state, "emptyCache");
  state.idle.clear();
}

void reset_peak(int device) {
  Device& state = device_at(device);
  const std::lock_guard lock(state.mutex);
  state.counters.peak_bytes = state.counters.bytes;
}

void count(int device, Count what) {
  Device& state = device_at(device);
  const std::lock_guard lock(state.mutex);
  Counters& all = state.counters;
  switch (what) {
    case Count::kCopyToHost:
      ++all.copies_to_host;
      break;
    case Count::kCopyToDevice:
      ++all.copies_to_device;
      break;
    case Count::kPageableCopy:
      ++all.pageable_copies;
      break;
    case Count::kCollective:
      ++all.collectives;
      break;
  }
}

}  // namespace tessera::pretend
