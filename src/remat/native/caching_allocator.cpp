// PyTorch's caching allocator of an accelerator's memory: native twin of
// remat.memory.caching_allocator, which is written in another way on purpose.
//
// The rules are those of c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.11 to 2.15, and
// the constants those of c10/core/AllocatorConfig.h. Functions here have the names of the
// functions there. Blocks of a segment are a list, free blocks a set a pool, ordered by
// stream, size and address, as there.

#include "caching_allocator.hpp"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checks.hpp"

namespace nb = nanobind;

namespace remat {
namespace {

using Bytes = std::int64_t;
using Index = std::int64_t;

// c10/core/AllocatorConfig.h.
constexpr Bytes kMinBlockSize = 512;
constexpr Bytes kSmallSize = 1048576;
constexpr Bytes kSmallBuffer = 2097152;
constexpr Bytes kMinLargeAlloc = 10485760;
constexpr Bytes kRoundLarge = 2097152;
constexpr std::size_t kIntervals = 16;
constexpr int kFirstInterval = 20;

constexpr Index kNone = -1;
// Each expandable segment has an address space of its own, larger than all requests.
constexpr int kSpaceBits = 52;
constexpr Index kMostStreams = 256;
constexpr Bytes kMostRequested = Bytes{1} << 48;
constexpr Bytes kMostLimit = Bytes{1} << 50;
constexpr Bytes kMostSegment = Bytes{1} << 30;
constexpr Bytes kMostSegments = Bytes{1} << 50;

// As remat.memory.caching_allocator has them.
enum Kind : Index { kAllocate, kFree, kRecord, kComplete, kEmptyCache };
enum Action : Index { kSegmentAlloc, kSegmentFree, kSegmentMap, kSegmentUnmap, kOom };
enum State : Index { kInactive, kPending, kAllocated };

using Request = std::tuple<Index, Index, Bytes, Index>;
using Rules = std::tuple<bool, Bytes, Bytes, Bytes, std::vector<Bytes>, double, Bytes,
                         Bytes, std::vector<Bytes>>;
using DeviceCall = std::tuple<Index, Index, Bytes, Bytes, Index>;
using SegmentRow = std::tuple<Bytes, Bytes, Index, bool, bool>;
using BlockRow = std::tuple<Index, Bytes, Bytes, Bytes, Index>;
using Replayed =
    std::tuple<std::vector<Bytes>, std::vector<Bytes>, std::vector<Bytes>,
               std::vector<Bytes>, std::vector<DeviceCall>, std::vector<SegmentRow>,
               std::vector<BlockRow>>;

struct Stat {
  std::int64_t current = 0;
  std::int64_t peak = 0;
  std::int64_t allocated = 0;
  std::int64_t freed = 0;

  void increase(std::int64_t amount) {
    current += amount;
    peak = std::max(current, peak);
    allocated += amount;
  }
  void decrease(std::int64_t amount) {
    current -= amount;
    freed += amount;
  }
};
// Of both pools, of the small one, of the large one.
using Stats = std::array<Stat, 3>;

struct Pool;

struct Block {
  Index stream = 0;
  Bytes size = 0;
  Bytes address = 0;
  Pool* pool = nullptr;
  Bytes requested = 0;
  bool is_allocated = false;
  bool is_mapped = true;
  bool is_expandable = false;
  Block* prev = nullptr;
  Block* next = nullptr;
  int event_count = 0;
  std::set<Index> stream_uses;
  std::int64_t gc_count_base = 0;

  [[nodiscard]] bool is_split() const { return prev != nullptr || next != nullptr; }
  // Neither handed out nor waiting for a stream.
  [[nodiscard]] bool is_free() const {
    return !is_allocated && event_count == 0 && stream_uses.empty();
  }
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->stream, a->size, a->address) <
           std::tie(b->stream, b->size, b->address);
  }
};
struct ByAddress {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->stream, a->address) < std::tie(b->stream, b->address);
  }
};

struct Pool {
  bool is_small;
  std::set<Block*, BySize> blocks;
  std::set<Block*, ByAddress> unmapped;
  std::int64_t get_free_blocks_call_count = 0;
};

class Allocator {
 public:
  explicit Allocator(Rules rules) {
    std::tie(expandable_segments_, max_split_size_, max_non_split_rounding_size_,
             large_segment_size_, divisions_, garbage_collection_threshold_,
             allowed_memory_maximum_, capacity_, addresses_) = std::move(rules);
    if (max_split_size_ == kNone) max_split_size_ = std::numeric_limits<Bytes>::max();
    small_.is_small = true;
    large_.is_small = false;
  }

  void take(const Request& request) {
    const auto& [kind, number, size, stream] = request;
    switch (kind) {
      case kAllocate: {
        require(!live_.contains(number), "a block is allocated twice");
        Block* const block = malloc(size, stream);
        live_.emplace(number, block);
        result_address_ = block == nullptr ? kNone : block->address;
        break;
      }
      case kFree: {
        const auto found = live_.find(number);
        require(found != live_.end(), "a block is freed that is not allocated");
        if (found->second != nullptr) free(found->second);
        live_.erase(found);
        break;
      }
      case kRecord: {
        const auto found = live_.find(number);
        require(found != live_.end(), "a stream uses a block that is not allocated");
        // recordStream: a use on the block's own stream needs nothing.
        if (found->second != nullptr && found->second->stream != stream) {
          found->second->stream_uses.insert(stream);
        }
        break;
      }
      case kComplete:
        for (auto& [block, is_over] : events_[stream]) is_over = true;
        break;
      default:
        release_cached_blocks();
    }
    ++position_;
  }

  [[nodiscard]] Bytes reserved() const { return reserved_bytes_[0].current; }
  [[nodiscard]] Bytes allocated() const { return allocated_bytes_[0].current; }
  // The address of the block that was allocated last.
  [[nodiscard]] Bytes address() const { return result_address_; }
  [[nodiscard]] std::vector<DeviceCall>& calls() { return calls_; }

  [[nodiscard]] std::vector<Bytes> statistics() const {
    std::vector<Bytes> numbers;
    for (const Stats* const stats :
         {&allocation_, &segment_, &active_, &inactive_split_, &allocated_bytes_,
          &reserved_bytes_, &active_bytes_, &inactive_split_bytes_, &requested_bytes_}) {
      for (const Stat& stat : *stats) append(numbers, stat);
    }
    append(numbers, oversize_allocations_);
    append(numbers, oversize_segments_);
    numbers.insert(numbers.end(), {num_alloc_retries_, num_ooms_, num_sync_all_streams_,
                                   num_device_alloc_, num_device_free_});
    return numbers;
  }

  // As snapshot(): a row a stretch of mapped blocks, and a row a block.
  void snapshot(std::vector<SegmentRow>& segments, std::vector<BlockRow>& rows) const {
    std::vector<const Block*> heads;
    for (const auto& block : blocks_) {
      if (block->is_mapped && (block->prev == nullptr || !block->prev->is_mapped)) {
        heads.push_back(block.get());
      }
    }
    std::ranges::sort(heads, [](const Block* a, const Block* b) {
      return std::tie(a->address, a->stream) < std::tie(b->address, b->stream);
    });
    for (const Block* const head : heads) {
      Bytes total = 0;
      for (const Block* block = head; block != nullptr && block->is_mapped;
           block = block->next) {
        const Index state =
            block->is_allocated ? kAllocated : (block->is_free() ? kInactive : kPending);
        rows.emplace_back(static_cast<Index>(segments.size()), block->address,
                          block->size, state == kInactive ? 0 : block->requested, state);
        total += block->size;
      }
      segments.emplace_back(head->address, total, head->stream, !head->pool->is_small,
                            head->is_expandable);
    }
  }

  // What holds after every request; a fault of this file if it does not.
  void check() const {
    Bytes mapped = 0;
    Bytes allocated = 0;
    Bytes active = 0;
    Bytes requested = 0;
    Bytes split = 0;
    std::size_t free_count = 0;
    std::size_t unmapped_count = 0;
    for (const auto& owner : blocks_) {
      Block* const block = owner.get();
      must(block->size > 0, "a block is empty");
      if (const Block* const next = block->next; next != nullptr) {
        must(next->prev == block, "neighbours disagree");
        must(next->address == block->address + block->size, "blocks overlap or gape");
        must(next->pool == block->pool && next->stream == block->stream,
             "a segment is of two pools");
        must(!(block->is_free() && next->is_free() &&
               block->is_mapped == next->is_mapped),
             "neighbours are not merged");
      }
      if (!block->is_mapped) {
        must(block->pool->unmapped.contains(block), "an unmapped block is lost");
        ++unmapped_count;
        continue;
      }
      mapped += block->size;
      if (block->is_allocated) allocated += block->size;
      if (block->is_free()) {
        must(block->pool->blocks.contains(block), "a free block is lost");
        ++free_count;
        if (block->is_split() && !block->is_expandable) split += block->size;
      } else {
        active += block->size;
        requested += block->requested;
      }
    }
    must(free_count == small_.blocks.size() + large_.blocks.size(),
         "a pool holds a block that is not free");
    must(unmapped_count == small_.unmapped.size() + large_.unmapped.size(),
         "a pool holds a block that is mapped");
    must(mapped == reserved() && mapped == total_allocated_memory_, "reserved bytes");
    must(allocated == allocated_bytes_[0].current, "allocated bytes");
    must(active == active_bytes_[0].current, "active bytes");
    must(requested == requested_bytes_[0].current, "requested bytes");
    must(split == inactive_split_bytes_[0].current, "inactive split bytes");
    for (const Stats* const stats :
         {&allocation_, &segment_, &active_, &inactive_split_, &allocated_bytes_,
          &reserved_bytes_, &active_bytes_, &inactive_split_bytes_, &requested_bytes_}) {
      const auto& [all, small, large] = *stats;
      must(all.current == small.current + large.current, "the pools' sums");
    }
    Bytes end = 0;
    for (const auto& [address, size] : segments_) {
      must(address >= end, "segments overlap");
      end = address + size;
    }
  }

 private:
  static void must(bool holds, const char* message) {
    if (!holds) throw std::logic_error(message);
  }

  static void append(std::vector<Bytes>& numbers, const Stat& stat) {
    numbers.insert(numbers.end(), {stat.current, stat.peak, stat.allocated, stat.freed});
  }

  static std::size_t type_of(const Pool& pool) { return pool.is_small ? 1 : 2; }
  static void increase(Stats& stats, const Pool& pool, std::int64_t amount) {
    stats[0].increase(amount);
    stats[type_of(pool)].increase(amount);
  }
  static void decrease(Stats& stats, const Pool& pool, std::int64_t amount) {
    stats[0].decrease(amount);
    stats[type_of(pool)].decrease(amount);
  }
  static void change(Stats& stats, const Pool& pool, std::int64_t amount) {
    if (amount > 0) increase(stats, pool, amount);
    if (amount < 0) decrease(stats, pool, -amount);
  }

  Block* new_block(Index stream, Bytes size, Pool* pool, Bytes address) {
    auto block = std::make_unique<Block>();
    block->stream = stream;
    block->size = size;
    block->pool = pool;
    block->address = address;
    places_.emplace(block.get(), blocks_.size());
    blocks_.push_back(std::move(block));
    return blocks_.back().get();
  }

  void delete_block(Block* block) {
    const auto place = places_.find(block);
    const std::size_t index = place->second;
    places_.erase(place);
    if (index + 1 < blocks_.size()) {
      std::swap(blocks_[index], blocks_.back());
      places_[blocks_[index].get()] = index;
    }
    blocks_.pop_back();
  }

  void call(Action action, Bytes address, Bytes size, Index stream) {
    calls_.emplace_back(position_, action, address, size, stream);
  }

  // AcceleratorAllocatorConfig::roundup_power2_divisions.
  [[nodiscard]] Bytes divisions_of(Bytes size) const {
    const int log = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(size))) - 1;
    const int interval =
        std::clamp(log - kFirstInterval, 0, static_cast<int>(kIntervals) - 1);
    return divisions_[static_cast<std::size_t>(interval)];
  }

  static Bytes roundup_power2_next_division(Bytes size, Bytes divisions) {
    const auto bits = static_cast<std::uint64_t>(size);
    if (size <= 4 || divisions <= 1 || std::has_single_bit(bits)) return size;
    const auto floor = static_cast<Bytes>(std::bit_floor(bits));
    const Bytes division =
        floor >> (std::bit_width(static_cast<std::uint64_t>(divisions)) - 1);
    if (division == 0) return floor * 2;
    const Bytes rounded = size & ~(division - 1);
    return rounded == size ? size : rounded + division;
  }

  [[nodiscard]] Bytes round_size(Bytes size) const {
    if (size < kMinBlockSize) return kMinBlockSize;
    const Bytes divisions = divisions_of(size);
    if (divisions > 0 && size > kMinBlockSize * divisions) {
      return roundup_power2_next_division(size, divisions);
    }
    return kMinBlockSize * ((size + kMinBlockSize - 1) / kMinBlockSize);
  }

  [[nodiscard]] Bytes get_allocation_size(Bytes size) const {
    if (size <= kSmallSize) return kSmallBuffer;
    if (size < kMinLargeAlloc) return large_segment_size_;
    return kRoundLarge * ((size + kRoundLarge - 1) / kRoundLarge);
  }

  [[nodiscard]] bool should_split(const Block* block, Bytes size) const {
    const Bytes remaining = block->size - size;
    if (block->pool->is_small || expandable_segments_) return remaining >= kMinBlockSize;
    return size < max_split_size_ && remaining > kSmallSize;
  }

  [[nodiscard]] bool collects_garbage() const {
    return allowed_memory_maximum_ != kNone && garbage_collection_threshold_ > 0.0;
  }

  Block* malloc(Bytes requested, Index stream) {
    process_events();
    const Bytes size = round_size(requested);
    Pool& pool = size <= kSmallSize ? small_ : large_;
    const Bytes alloc_size = get_allocation_size(size);
    Block* block = get_free_block(pool, size, stream);
    if (block == nullptr) {
      if (collects_garbage()) garbage_collect_cached_blocks();
      block = alloc_block(pool, size, alloc_size, stream, false);
    }
    if (block == nullptr && release_available_cached_blocks(pool, size, stream)) {
      block = alloc_block(pool, size, alloc_size, stream, false);
    }
    if (block == nullptr) {
      release_cached_blocks();
      block = alloc_block(pool, size, alloc_size, stream, true);
    }
    if (block == nullptr) {
      ++num_ooms_;
      call(kOom, kNone, size, stream);
      return nullptr;
    }
    return alloc_found_block(block, size, requested);
  }

  Block* alloc_found_block(Block* block, Bytes size, Bytes requested) {
    Pool& pool = *block->pool;
    const bool already_split = block->is_split();
    if (should_split(block, size)) {
      Block* const remaining = block;
      block = new_block(remaining->stream, size, &pool, remaining->address);
      block->is_expandable = remaining->is_expandable;
      block->prev = remaining->prev;
      if (block->prev != nullptr) block->prev->next = block;
      block->next = remaining;
      remaining->prev = block;
      remaining->address += size;
      remaining->size -= size;
      insert_into_blocks(remaining);
      if (already_split && !block->is_expandable) {
        decrease(inactive_split_bytes_, pool, block->size);
      } else if (!block->is_expandable) {
        increase(inactive_split_bytes_, pool, remaining->size);
        increase(inactive_split_, pool, 1);
      }
    } else if (already_split && !block->is_expandable) {
      decrease(inactive_split_bytes_, pool, block->size);
      decrease(inactive_split_, pool, 1);
    }
    block->is_allocated = true;
    block->requested = requested;
    increase(allocation_, pool, 1);
    increase(allocated_bytes_, pool, block->size);
    increase(active_, pool, 1);
    increase(active_bytes_, pool, block->size);
    increase(requested_bytes_, pool, requested);
    if (block->size >= max_split_size_) oversize_allocations_.increase(1);
    return block;
  }

  void free(Block* block) {
    block->is_allocated = false;
    decrease(allocation_, *block->pool, 1);
    decrease(allocated_bytes_, *block->pool, block->size);
    if (block->size >= max_split_size_) oversize_allocations_.decrease(1);
    if (block->stream_uses.empty()) {
      free_block(block);
    } else {
      insert_events(block);
    }
  }

  void insert_events(Block* block) {
    const std::set<Index> streams = std::exchange(block->stream_uses, {});
    for (const Index stream : streams) {
      ++block->event_count;
      events_[stream].emplace_back(block, false);
    }
  }

  void process_events() {
    for (auto queue = events_.begin(); queue != events_.end();) {
      auto& waiting = queue->second;
      while (!waiting.empty() && waiting.front().second) {
        finish_event(waiting.front().first);
        waiting.pop_front();
      }
      queue = waiting.empty() ? events_.erase(queue) : std::next(queue);
    }
  }

  void synchronize_and_free_events() {
    ++num_sync_all_streams_;
    for (auto& [stream, waiting] : events_) {
      for (auto& [block, is_over] : waiting) finish_event(block);
    }
    events_.clear();
  }

  void finish_event(Block* block) {
    if (--block->event_count == 0) free_block(block);
  }

  void insert_into_blocks(Block* block) {
    block->gc_count_base = block->pool->get_free_blocks_call_count;
    block->pool->blocks.insert(block);
  }

  void free_block(Block* block) {
    Pool& pool = *block->pool;
    const Bytes size = block->size;
    std::int64_t split_blocks = 0;
    std::int64_t split_bytes = 0;
    for (Block* const candidate : {block->prev, block->next}) {
      if (const Bytes subsumed = try_merge_blocks(block, candidate); subsumed > 0) {
        --split_blocks;
        split_bytes -= subsumed;
      }
    }
    insert_into_blocks(block);
    if (block->is_split()) {
      ++split_blocks;
      split_bytes += block->size;
    }
    if (!block->is_expandable) {
      change(inactive_split_, pool, split_blocks);
      change(inactive_split_bytes_, pool, split_bytes);
    }
    decrease(active_, pool, 1);
    decrease(active_bytes_, pool, size);
    decrease(requested_bytes_, pool, block->requested);
  }

  Bytes try_merge_blocks(Block* target, Block* source) {
    if (source == nullptr || !source->is_free() ||
        target->is_mapped != source->is_mapped) {
      return 0;
    }
    if (source->is_mapped) {
      source->pool->blocks.erase(source);
    } else {
      source->pool->unmapped.erase(source);
    }
    if (target->prev == source) {
      target->address = source->address;
      target->prev = source->prev;
      if (target->prev != nullptr) target->prev->next = target;
    } else {
      target->next = source->next;
      if (target->next != nullptr) target->next->prev = target;
    }
    const Bytes subsumed = source->size;
    target->size += subsumed;
    delete_block(source);
    return subsumed;
  }

  Block* get_free_block(Pool& pool, Bytes size, Index stream) {
    if (collects_garbage()) ++pool.get_free_blocks_call_count;
    Block key;
    key.stream = stream;
    key.size = size;
    key.address = std::numeric_limits<Bytes>::min();
    auto it = pool.blocks.lower_bound(&key);
    if (it == pool.blocks.end() || (*it)->stream != stream) return nullptr;
    if ((*it)->is_expandable) {
      // A block that can grow counts as large as it can become.
      const auto expandable_size = [](const Block* b) {
        return b->size + (b->next != nullptr && !b->next->is_mapped ? b->next->size : 0);
      };
      auto next = std::next(it);
      while (next != pool.blocks.end() && (*next)->stream == stream &&
             expandable_size(*next) < expandable_size(*it)) {
        it = next++;
      }
    }
    if (size < max_split_size_ && (*it)->size >= max_split_size_) return nullptr;
    if (size >= max_split_size_ && (*it)->size >= size + max_non_split_rounding_size_) {
      return nullptr;
    }
    Block* const block = *it;
    pool.blocks.erase(it);
    return block;
  }

  Block* alloc_block(Pool& pool, Bytes size, Bytes alloc_size, Index stream,
                     bool is_retry) {
    if (is_retry) ++num_alloc_retries_;
    if (allowed_memory_maximum_ != kNone &&
        total_allocated_memory_ + alloc_size > allowed_memory_maximum_) {
      return nullptr;
    }
    if (expandable_segments_) return try_allocate_expandable_block(pool, size, stream);
    if (!has_room(alloc_size)) return nullptr;
    const Bytes address = new_address(alloc_size);
    total_allocated_memory_ += alloc_size;
    Block* const block = new_block(stream, alloc_size, &pool, address);
    segments_.emplace(address, alloc_size);
    increase(segment_, pool, 1);
    increase(reserved_bytes_, pool, alloc_size);
    if (alloc_size >= max_split_size_) oversize_segments_.increase(1);
    ++num_device_alloc_;
    call(kSegmentAlloc, address, alloc_size, stream);
    return block;
  }

  [[nodiscard]] bool has_room(Bytes size) const {
    return capacity_ == kNone || total_allocated_memory_ + size <= capacity_;
  }

  Bytes new_address(Bytes size) {
    Bytes address = next_address_;
    if (given_ < addresses_.size()) {
      address = addresses_[given_++];
      const auto after = segments_.upper_bound(address);
      const bool is_apart =
          (after == segments_.end() || address + size <= after->first) &&
          (after == segments_.begin() ||
           std::prev(after)->first + std::prev(after)->second <= address);
      require(is_apart, "a segment's address is in use");
    }
    next_address_ = std::max(next_address_, address + size);
    return address;
  }

  Block* find_expandable_block(Pool& pool, Index stream, Bytes size) {
    const auto has_space = [size](const Block* block) {
      Bytes bytes = 0;
      while (bytes < size && block != nullptr && block->is_free()) {
        bytes += block->size;
        block = block->next;
      }
      return bytes >= size;
    };
    Block key;
    key.stream = stream;
    key.address = std::numeric_limits<Bytes>::min();
    for (auto it = pool.unmapped.lower_bound(&key);
         it != pool.unmapped.end() && (*it)->stream == stream; ++it) {
      Block* block = *it;
      if (block->prev != nullptr && block->prev->is_free()) block = block->prev;
      if (has_space(block)) return block;
    }
    const Bytes base = (1 + 2 * stream + (pool.is_small ? 1 : 0)) << kSpaceBits;
    Block* const block = new_block(stream, Bytes{1} << kSpaceBits, &pool, base);
    block->is_mapped = false;
    block->is_expandable = true;
    pool.unmapped.insert(block);
    return block;
  }

  Block* try_allocate_expandable_block(Pool& pool, Bytes size, Index stream) {
    Block* candidate = find_expandable_block(pool, stream, size);
    if (!candidate->is_mapped && !map_block(candidate, std::min(candidate->size, size))) {
      return nullptr;
    }
    while (candidate->size < size) {
      Block* const next = candidate->next;
      if (!map_block(next, std::min(size - candidate->size, next->size))) return nullptr;
      candidate = next;
    }
    pool.blocks.erase(candidate);
    return candidate;
  }

  // Pages, from an address that is at the beginning of one, and so is every unmapped one.
  bool map_block(Block* block, Bytes size) {
    Pool& pool = *block->pool;
    const Bytes page = pool.is_small ? kSmallBuffer : large_segment_size_;
    const Bytes mapped = std::min(block->size, page * ((size + page - 1) / page));
    if (!has_room(mapped)) return false;
    pool.unmapped.erase(block);
    block->is_mapped = true;
    if (mapped < block->size) {
      Block* const remaining =
          new_block(block->stream, block->size - mapped, &pool, block->address + mapped);
      remaining->is_mapped = false;
      remaining->is_expandable = true;
      remaining->prev = block;
      remaining->next = block->next;
      if (remaining->next != nullptr) remaining->next->prev = remaining;
      block->next = remaining;
      pool.unmapped.insert(remaining);
      block->size = mapped;
    }
    const Bytes address = block->address;
    try_merge_blocks(block, block->prev);
    try_merge_blocks(block, block->next);
    insert_into_blocks(block);
    total_allocated_memory_ += mapped;
    increase(reserved_bytes_, pool, mapped);
    ++num_device_alloc_;
    call(kSegmentMap, address, mapped, block->stream);
    return true;
  }

  void unmap_block(Block* block) {
    Pool& pool = *block->pool;
    const Bytes page = pool.is_small ? kSmallBuffer : large_segment_size_;
    const Bytes space = Bytes{1} << kSpaceBits;
    const Bytes base = block->address / space * space;
    const Bytes begin = base + (block->address - base + page - 1) / page * page;
    const Bytes last = block->address + block->size;
    const Bytes end = base + (last - base) / page * page;
    if (begin >= end) return;
    pool.blocks.erase(block);
    if (begin > block->address) {
      Block* const before =
          new_block(block->stream, begin - block->address, &pool, block->address);
      before->is_expandable = true;
      before->prev = block->prev;
      if (before->prev != nullptr) before->prev->next = before;
      before->next = block;
      block->prev = before;
      insert_into_blocks(before);
    }
    if (last > end) {
      Block* const after = new_block(block->stream, last - end, &pool, end);
      after->is_expandable = true;
      after->prev = block;
      after->next = block->next;
      if (after->next != nullptr) after->next->prev = after;
      block->next = after;
      insert_into_blocks(after);
    }
    block->address = begin;
    block->size = end - begin;
    block->is_mapped = false;
    try_merge_blocks(block, block->prev);
    try_merge_blocks(block, block->next);
    pool.unmapped.insert(block);
    total_allocated_memory_ -= end - begin;
    decrease(reserved_bytes_, pool, end - begin);
    ++num_device_free_;
    call(kSegmentUnmap, begin, end - begin, block->stream);
  }

  void release_block(Block* block) {
    Pool& pool = *block->pool;
    ++num_device_free_;
    call(kSegmentFree, block->address, block->size, block->stream);
    total_allocated_memory_ -= block->size;
    decrease(segment_, pool, 1);
    decrease(reserved_bytes_, pool, block->size);
    if (block->size >= max_split_size_) oversize_segments_.decrease(1);
    pool.blocks.erase(block);
    segments_.erase(block->address);
    delete_block(block);
  }

  bool release_available_cached_blocks(Pool& pool, Bytes size, Index stream) {
    if (max_split_size_ == std::numeric_limits<Bytes>::max()) return false;
    Block key;
    key.stream = stream;
    key.size = std::max(size, max_split_size_);
    key.address = std::numeric_limits<Bytes>::min();
    auto it = pool.blocks.lower_bound(&key);
    if (it != pool.blocks.end() && (*it)->stream == stream && !(*it)->is_expandable) {
      release_block(*it);
      return true;
    }
    if (it == pool.blocks.begin()) return false;
    Bytes released = 0;
    --it;
    while (released < key.size && (*it)->size >= max_split_size_ &&
           (*it)->stream == stream) {
      Block* const block = *it;
      const bool is_first = it == pool.blocks.begin();
      if (!is_first) --it;
      if (!block->is_expandable) {
        released += block->size;
        release_block(block);
      }
      if (is_first) break;
    }
    return released >= key.size;
  }

  void release_cached_blocks() {
    synchronize_and_free_events();
    release_blocks(large_);
    release_blocks(small_);
  }

  void release_blocks(Pool& pool) {
    std::vector<Block*> to_unmap;
    for (auto it = pool.blocks.begin(); it != pool.blocks.end();) {
      Block* const block = *it++;
      if (block->is_expandable) {
        to_unmap.push_back(block);
      } else if (!block->is_split()) {
        release_block(block);
      }
    }
    for (Block* const block : to_unmap) {
      unmap_block(block);
      if (!block->is_split() && !block->is_mapped) {
        pool.unmapped.erase(block);
        delete_block(block);
      }
    }
  }

  void garbage_collect_cached_blocks() {
    const auto threshold = static_cast<Bytes>(garbage_collection_threshold_ *
                                              static_cast<double>(allowed_memory_maximum_));
    if (total_allocated_memory_ <= threshold) return;
    const Bytes target = total_allocated_memory_ - threshold;
    const auto age = [this](const Block* block) {
      return large_.get_free_blocks_call_count - block->gc_count_base;
    };
    std::int64_t total_age = 0;
    std::int64_t count = 0;
    for (const Block* const block : large_.blocks) {
      if (block->is_split()) continue;
      total_age += age(block);
      ++count;
    }
    Bytes reclaimed = 0;
    bool has_freed = true;
    while (reclaimed < target && has_freed && count > 0) {
      const double least_age = static_cast<double>(total_age) / static_cast<double>(count);
      has_freed = false;
      for (auto it = large_.blocks.begin(); it != large_.blocks.end();) {
        Block* const block = *it++;
        if (block->is_split() || block->is_expandable ||
            static_cast<double>(age(block)) < least_age) {
          continue;
        }
        has_freed = true;
        reclaimed += block->size;
        total_age -= age(block);
        --count;
        release_block(block);
      }
    }
  }

  bool expandable_segments_ = false;
  Bytes max_split_size_ = 0;
  Bytes max_non_split_rounding_size_ = 0;
  Bytes large_segment_size_ = 0;
  std::vector<Bytes> divisions_;
  double garbage_collection_threshold_ = 0.0;
  Bytes allowed_memory_maximum_ = kNone;
  Bytes capacity_ = kNone;
  std::vector<Bytes> addresses_;

  Pool small_{};
  Pool large_{};
  std::vector<std::unique_ptr<Block>> blocks_;
  std::unordered_map<const Block*, std::size_t> places_;
  // Null for a request that failed.
  std::unordered_map<Index, Block*> live_;
  std::map<Index, std::deque<std::pair<Block*, bool>>> events_;
  std::map<Bytes, Bytes> segments_;
  std::vector<DeviceCall> calls_;
  Index position_ = 0;
  Bytes result_address_ = kNone;
  Bytes next_address_ = kSmallBuffer;
  std::size_t given_ = 0;
  Bytes total_allocated_memory_ = 0;

  Stats allocation_{}, segment_{}, active_{}, inactive_split_{};
  Stats allocated_bytes_{}, reserved_bytes_{}, active_bytes_{};
  Stats inactive_split_bytes_{}, requested_bytes_{};
  Stat oversize_allocations_, oversize_segments_;
  std::int64_t num_alloc_retries_ = 0, num_ooms_ = 0, num_sync_all_streams_ = 0;
  std::int64_t num_device_alloc_ = 0, num_device_free_ = 0;
};

// As remat.memory.caching_allocator.check_rules.
void check_rules(const Rules& rules) {
  const auto& [expandable, max_split, rounding, segment, divisions, threshold, limit,
               capacity, addresses] = rules;
  require(max_split == kNone || (max_split > 0 && max_split <= kMostLimit),
          "max_split_size is not 1 to 2**50, nor -1");
  require(rounding >= 0 && rounding <= kMostLimit,
          "max_non_split_rounding is not 0 to 2**50");
  require(segment >= kMinLargeAlloc && segment <= kMostSegment &&
              segment % kRoundLarge == 0,
          "a large segment is not 10 MiB to 1 GiB, in steps of 2 MiB");
  require(max_split == kNone || max_split >= segment, "max_split_size is below a segment");
  require(divisions.size() == kIntervals, "there are not 16 numbers of divisions");
  for (const Bytes number : divisions) {
    require(number >= 0 && number <= kMostLimit &&
                (number & (number - 1)) == 0,
            "a number of divisions is neither 0 nor a power of two");
  }
  require(threshold >= 0.0 && threshold < 1.0, "the threshold is not 0 to below 1");
  for (const Bytes bytes : {limit, capacity}) {
    require(bytes == kNone || (bytes >= 0 && bytes <= kMostLimit),
            "a limit is not 0 to 2**50, nor -1");
  }
  for (const Bytes address : addresses) {
    require(address >= 0 && address <= (Bytes{1} << 60), "an address is not 0 to 2**60");
  }
}

// As remat.memory.caching_allocator.check_requests.
void check_requests(const std::vector<Request>& requests, Bytes segment) {
  Bytes requested = 0;
  for (const auto& [kind, number, size, stream] : requests) {
    require(kind >= kAllocate && kind <= kEmptyCache, "there is no such kind of request");
    require(stream >= 0 && stream < kMostStreams, "a stream is not 0 to 255");
    if (kind != kAllocate) continue;
    require(size > 0 && size <= kMostRequested, "a size is not 1 to 2**48");
    requested += size;
    require(requested <= kMostRequested, "the requests come to more than 2**48 bytes");
  }
  require((Capped::count(requests.size()) * Capped(segment)).value() <= kMostSegments,
          "the segments may come to more than 2**50 bytes");
}

Replayed replay_requests(const std::vector<Request>& requests, Rules rules,
                         std::int64_t check_every) {
  check_rules(rules);
  check_requests(requests, std::get<3>(rules));
  require(check_every >= 0, "a number is negative");
  Allocator allocator(std::move(rules));
  Replayed result;
  auto& [addresses, reserved, allocated, statistics, calls, segments, blocks] = result;
  addresses.reserve(requests.size());
  reserved.reserve(requests.size());
  allocated.reserve(requests.size());
  std::int64_t until_check = check_every;
  for (const Request& request : requests) {
    allocator.take(request);
    addresses.push_back(std::get<0>(request) == kAllocate ? allocator.address() : kNone);
    reserved.push_back(allocator.reserved());
    allocated.push_back(allocator.allocated());
    if (check_every > 0 && --until_check == 0) {
      allocator.check();
      until_check = check_every;
    }
  }
  statistics = allocator.statistics();
  allocator.snapshot(segments, blocks);
  calls = std::move(allocator.calls());
  return result;
}

}  // namespace

void bind_caching_allocator(nb::module_& module) {
  module.def("replay_requests", &replay_requests, nb::arg("requests"), nb::arg("rules"),
             nb::arg("check_every"));
}

}  // namespace remat
