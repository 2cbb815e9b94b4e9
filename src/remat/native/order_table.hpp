// An order of runs on one device whose cost and peak are kept up to date while runs are put
// in, taken out and moved, in time that grows with the logarithm of the order per storage
// touched.
//
// Runs stand in *slots*, with empty slots between them, so that one is put in without moving
// the others. A copy of a storage takes its bytes from the run that writes it to the last read
// before the next run that writes it; a tree over the slots adds bytes to ranges and knows the
// largest sum.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "checks.hpp"

namespace remat {

using Slot = std::int32_t;
using OpId = std::int32_t;

// Sums over ranges of slots, and the largest one. A node holds what was added to all below
// it, and the largest sum below with that.
class MaxTree {
 public:
  void reset(std::size_t count) {
    leaves_ = std::bit_ceil(std::max<std::size_t>(count, 2));
    most_.assign(2 * leaves_, 0);
    added_.assign(leaves_, 0);
  }

  std::size_t leaves() const { return leaves_; }
  std::int64_t most() const { return most_[1]; }

  void add(Slot first, Slot last, std::int64_t amount) {
    if (first > last || amount == 0) return;
    std::size_t left = leaves_ + static_cast<std::size_t>(first);
    std::size_t right = leaves_ + static_cast<std::size_t>(last) + 1;
    std::size_t low = left;
    std::size_t high = right - 1;
    for (; left < right; left >>= 1U, right >>= 1U) {
      if ((left & 1U) != 0) apply(left++, amount);
      if ((right & 1U) != 0) apply(--right, amount);
    }
    // Nothing was added above where the ways up from both ends meet: from there on a sum
    // that stays ends the way.
    while (low != high) {
      low >>= 1U;
      high >>= 1U;
      lift(low);
      if (low != high) lift(high);
    }
    for (low >>= 1U; low >= 1 && lift(low);) low >>= 1U;
  }

  // The largest sum from first to last, or 0 where there is none.
  std::int64_t most_in(Slot first, Slot last) const {
    return first > last ? 0 : most_below(1, 0, leaves_ - 1, static_cast<std::size_t>(first),
                                         static_cast<std::size_t>(last));
  }

  // The first slot with the largest sum.
  Slot fullest() const {
    std::size_t node = 1;
    while (node < leaves_) {
      const std::size_t left = 2 * node;
      node = most_[left] + added_[node] == most_[node] ? left : left + 1;
    }
    return static_cast<Slot>(node - leaves_);
  }

 private:
  void apply(std::size_t node, std::int64_t amount) {
    most_[node] += amount;
    if (node < leaves_) added_[node] += amount;
  }

  // Takes over the largest sum of both below a node; whether it is another one.
  bool lift(std::size_t node) {
    const std::int64_t before = most_[node];
    most_[node] = std::max(most_[2 * node], most_[2 * node + 1]) + added_[node];
    return most_[node] != before;
  }

  std::int64_t most_below(std::size_t node, std::size_t low, std::size_t high,
                          std::size_t first, std::size_t last) const {
    if (first <= low && high <= last) return most_[node];
    const std::size_t middle = (low + high) / 2;
    if (last <= middle) return most_below(2 * node, low, middle, first, last) + added_[node];
    if (first > middle) {
      return most_below(2 * node + 1, middle + 1, high, first, last) + added_[node];
    }
    return std::max(most_below(2 * node, low, middle, first, last),
                    most_below(2 * node + 1, middle + 1, high, first, last)) +
           added_[node];
  }

  std::size_t leaves_ = 0;
  std::vector<std::int64_t> most_;
  std::vector<std::int64_t> added_;
};

// What is known of a graph on one device; the end and the boundary stand behind the ops.
struct OrderGraph {
  std::vector<std::vector<std::int64_t>> reads;
  std::vector<std::vector<std::int64_t>> writes;
  std::vector<std::int64_t> size;
  std::vector<std::int64_t> cost;
  std::vector<std::int64_t> workspace;
  std::vector<bool> stays_once;
  std::int64_t resident_bytes = 0;
  std::vector<bool> may_rerun;
  std::vector<bool> is_ordered;
  std::vector<bool> is_external;
  std::int64_t forward_count = 0;
  // The op that writes each storage, or -1.
  std::vector<OpId> producer;

  OpId end() const { return static_cast<OpId>(cost.size()); }
  OpId boundary() const { return end() + 1; }
  bool is_op(OpId op) const { return op < end(); }
  bool is_forward(OpId op) const { return op < forward_count; }
};

class OrderTable {
 public:
  static constexpr OpId kEmpty = -1;
  static constexpr Slot kNone = -1;

  explicit OrderTable(OrderGraph graph) : graph_(std::move(graph)) {
    const std::size_t ops = graph_.cost.size() + 2;
    runs_.resize(ops);
    reads_.resize(graph_.size.size());
    repeated_at_.assign(ops, kNowhere);
    for (OpId op = 0; op < graph_.end(); ++op) {
      if (graph_.is_ordered[at(op)]) ordered_.push_back(op);
    }
    ordered_at_.assign(ops, 0);
    for (std::size_t k = 0; k < ordered_.size(); ++k) ordered_at_[at(ordered_[k])] = k;
  }

  // Puts an order of runs in place of the one before. Reads come after what they read.
  // `room` is how many empty slots stand before the run that is number `crowded`.
  void assign(const std::vector<OpId>& order, std::size_t crowded = kNowhere,
              std::size_t room = 0) {
    for (auto& runs : runs_) runs.clear();
    for (auto& reads : reads_) reads.clear();
    repeated_.clear();
    repeated_at_.assign(runs_.size(), kNowhere);
    undo_.clear();
    cost_ = 0;
    const std::size_t wanted = (order.size() + 2) * kStride + room;
    tree_.reset(wanted);
    slot_op_.assign(tree_.leaves(), kEmpty);
    taken_.assign(tree_.leaves() / kBits + 1, 0);
    const std::size_t stride = (tree_.leaves() - room) / (order.size() + 2);
    std::size_t slot = stride;
    for (std::size_t k = 0; k < order.size(); ++k, slot += stride) {
      if (k == crowded) slot += room;
      place(order[k], static_cast<Slot>(slot));
    }
    place(graph_.end(), static_cast<Slot>(slot));
    tree_.add(0, static_cast<Slot>(tree_.leaves() - 1), graph_.resident_bytes);
    undo_.clear();
    external_[0] = external_[1] = static_cast<Slot>(tree_.leaves());
    for (OpId op = 0; op < graph_.end(); ++op) {
      if (!graph_.is_external[at(op)] || runs_[at(op)].empty()) continue;
      auto& first = external_[graph_.is_forward(op) ? 0 : 1];
      first = std::min(first, runs_[at(op)].front());
    }
  }

  const OrderGraph& graph() const { return graph_; }
  std::int64_t cost() const { return cost_; }
  std::int64_t peak() const { return tree_.most(); }
  const MaxTree& tree() const { return tree_; }
  std::size_t run_count() const { return run_count_; }
  const std::vector<Slot>& runs(OpId op) const { return runs_[at(op)]; }
  const std::vector<Slot>& reads(std::int64_t storage) const { return reads_[at(storage)]; }
  OpId op_at(Slot slot) const { return slot_op_[at(slot)]; }
  Slot end_slot() const { return runs_[at(graph_.end())].front(); }
  Slot boundary_slot() const { return runs_[at(graph_.boundary())].front(); }
  // Ops that run more than once.
  const std::vector<OpId>& repeated() const { return repeated_; }

  std::vector<OpId> order() const {
    std::vector<OpId> found;
    found.reserve(run_count_);
    for (const OpId op : slot_op_) {
      if (op != kEmpty && op != graph_.end()) found.push_back(op);
    }
    return found;
  }

  // The taken slot before a slot, or -1; the one after it, or -1.
  Slot taken_before(Slot slot) const {
    std::size_t word = at(slot) / kBits;
    std::uint64_t bits = taken_[word] & ((std::uint64_t{1} << (at(slot) % kBits)) - 1);
    while (bits == 0) {
      if (word == 0) return kNone;
      bits = taken_[--word];
    }
    return static_cast<Slot>(word * kBits + kBits - 1 -
                             static_cast<std::size_t>(std::countl_zero(bits)));
  }
  Slot taken_after(Slot slot) const {
    const std::size_t next = at(slot) + 1;
    std::size_t word = next / kBits;
    if (word >= taken_.size()) return kNone;
    std::uint64_t bits = taken_[word] & (~std::uint64_t{0} << (next % kBits));
    while (bits == 0) {
      if (++word == taken_.size()) return kNone;
      bits = taken_[word];
    }
    return static_cast<Slot>(word * kBits + static_cast<std::size_t>(std::countr_zero(bits)));
  }

  // An empty slot between a run and the one before it, or -1 if there is none.
  Slot slot_before(Slot slot) const {
    const Slot before = taken_before(slot);
    const Slot room = slot - before - 1;
    return room <= 0 ? kNone : slot - 1 - room / 4;
  }

  // The last run of an op before a slot, and the first one after it; -1 if there is none.
  Slot run_before(OpId op, Slot slot) const {
    const auto& runs = runs_[at(op)];
    const auto it = std::ranges::lower_bound(runs, slot);
    return it == runs.begin() ? kNone : *(it - 1);
  }
  Slot run_after(OpId op, Slot slot) const {
    const auto& runs = runs_[at(op)];
    const auto it = std::ranges::upper_bound(runs, slot);
    return it == runs.end() ? kNone : *it;
  }

  // The uses of a storage around a slot: the last write or read before it, and the first
  // read after it of the same copy; the second is -1 if the copy is not live there.
  std::pair<Slot, Slot> gap_at(std::int64_t storage, Slot slot) const {
    const OpId op = graph_.producer[at(storage)];
    if (op < 0) return {kNone, kNone};
    const Slot written = run_before(op, slot);
    if (written == kNone) return {kNone, kNone};
    const auto& reads = reads_[at(storage)];
    const auto it = std::ranges::lower_bound(reads, slot);
    if (it == reads.end() || *it == slot) return {kNone, kNone};
    const Slot rewritten = run_after(op, slot - 1);
    if (rewritten != kNone && rewritten < *it) return {kNone, kNone};
    const Slot used = it == reads.begin() ? written : std::max(written, *(it - 1));
    return {used, *it};
  }

  bool has_readers(OpId op, Slot slot) const {
    const Slot next = run_after(op, slot);
    return std::ranges::any_of(graph_.writes[at(op)], [&](std::int64_t s) {
      const auto& reads = reads_[at(s)];
      const auto it = std::ranges::upper_bound(reads, slot);
      return it != reads.end() && (next == kNone || *it < next);
    });
  }

  // Whether nobody reads a run, and it is not there for an effect.
  bool is_idle(OpId op, Slot slot) const {
    if (!graph_.is_op(op) || graph_.is_external[at(op)]) return false;
    if (graph_.stays_once[at(op)] && runs_[at(op)].front() == slot) return false;
    return !has_readers(op, slot);
  }

  // Whether a run may be put into an empty slot of an op that runs already, or runs no more.
  bool may_put(OpId op, Slot slot) const {
    if (!graph_.is_op(op) || graph_.is_external[at(op)] || is_callers(slot)) return false;
    if (!runs_[at(op)].empty() && !graph_.may_rerun[at(op)]) return false;
    return may_stand(op, slot);
  }

  bool may_take_out(OpId op, Slot slot) const {
    if (!graph_.is_op(op) || graph_.is_external[at(op)]) return false;
    const auto& runs = runs_[at(op)];
    if (runs.front() != slot) return true;
    const Slot next = runs.size() > 1 ? runs[1] : kNone;
    if (graph_.stays_once[at(op)] && (next == kNone || !may_begin(op, next))) return false;
    return std::ranges::all_of(graph_.writes[at(op)], [&](std::int64_t s) {
      const auto& reads = reads_[at(s)];
      return reads.empty() || (next != kNone && next < reads.front());
    });
  }

  // Whether a run may be moved to an empty slot.
  bool may_move(OpId op, Slot from, Slot to) const {
    if (!graph_.is_op(op) || graph_.is_external[at(op)] || is_callers(to)) return false;
    if (!may_stand(op, to)) return false;
    const auto& runs = runs_[at(op)];
    const Slot others = runs.front() != from ? runs.front()
                        : runs.size() > 1   ? runs[1]
                                            : kNone;
    const Slot first = others == kNone ? to : std::min(others, to);
    for (const std::int64_t s : graph_.writes[at(op)]) {
      const auto& reads = reads_[at(s)];
      if (!reads.empty() && reads.front() < first) return false;
    }
    return !graph_.stays_once[at(op)] || may_begin(op, first);
  }

  void put(OpId op, Slot slot) {
    place(op, slot);
    undo_.emplace_back(op, slot, true);
  }

  void take_out(OpId op, Slot slot) {
    lift_out(op, slot);
    undo_.emplace_back(op, slot, false);
  }

  // Takes out a run and those that nobody reads once it is gone.
  void take_out_all(OpId op, Slot slot) {
    pending_.assign(1, {op, slot});
    while (!pending_.empty()) {
      const auto [gone, from] = pending_.back();
      pending_.pop_back();
      if (slot_op_[at(from)] != gone) continue;
      take_out(gone, from);
      for (const std::int64_t s : graph_.reads[at(gone)]) {
        const OpId maker = graph_.producer[at(s)];
        if (maker < 0) continue;
        const Slot made = run_before(maker, from);
        if (made != kNone && is_idle(maker, made)) pending_.emplace_back(maker, made);
      }
    }
  }

  void move(OpId op, Slot from, Slot to) {
    take_out(op, from);
    put(op, to);
  }

  std::size_t mark() const { return undo_.size(); }
  std::size_t changes() const { return change_count_; }

  void roll_back(std::size_t mark) {
    while (undo_.size() > mark) {
      const auto [op, slot, was_put] = undo_.back();
      undo_.pop_back();
      if (was_put) {
        lift_out(op, slot);
      } else {
        place(op, slot);
      }
    }
  }

  void accept() { undo_.clear(); }

 private:
  static constexpr std::size_t kStride = 8;
  static constexpr std::size_t kBits = 64;
  static constexpr std::size_t kNowhere = static_cast<std::size_t>(-1);

  struct Change {
    OpId op;
    Slot slot;
    bool was_put;
  };

  template <typename Integer>
  static std::size_t at(Integer index) {
    return static_cast<std::size_t>(index);
  }

  // Whether the caller works there: nothing else of the pass runs after that has begun.
  bool is_callers(Slot slot) const {
    const Slot boundary = boundary_slot();
    return slot > end_slot() || (slot < boundary ? slot > external_[0] : slot > external_[1]);
  }

  // Whether an op finds what it reads, in its pass.
  bool may_stand(OpId op, Slot slot) const {
    if (!graph_.is_forward(op) && slot < boundary_slot()) return false;
    for (const std::int64_t s : graph_.reads[at(op)]) {
      const OpId maker = graph_.producer[at(s)];
      if (maker < 0 || runs_[at(maker)].empty() || runs_[at(maker)].front() > slot) {
        return false;
      }
    }
    if (!graph_.stays_once[at(op)]) return true;
    const auto& runs = runs_[at(op)];
    return runs.empty() ? may_begin(op, slot) : (runs.front() < slot || may_begin(op, slot));
  }

  // Whether the first run of an op with an effect may stand there.
  bool may_begin(OpId op, Slot slot) const {
    if (graph_.is_forward(op) && slot > boundary_slot()) return false;
    if (!graph_.is_ordered[at(op)]) return true;
    const std::size_t k = ordered_at_[at(op)];
    const auto first_of = [&](std::size_t other) {
      const auto& runs = runs_[at(ordered_[other])];
      return runs.empty() ? kNone : runs.front();
    };
    if (k > 0 && first_of(k - 1) > slot) return false;
    return k + 1 == ordered_.size() || first_of(k + 1) == kNone || first_of(k + 1) > slot;
  }

  void place(OpId op, Slot slot) {
    ++change_count_;
    slot_op_[at(slot)] = op;
    taken_[at(slot) / kBits] |= std::uint64_t{1} << (at(slot) % kBits);
    if (graph_.is_op(op)) {
      cost_ += graph_.cost[at(op)];
      tree_.add(slot, slot, graph_.workspace[at(op)]);
    }
    if (op != graph_.end()) ++run_count_;
    for (const std::int64_t s : graph_.writes[at(op)]) {
      const auto [before, after] = ends_around(op, s, slot);
      const std::int64_t size = graph_.size[at(s)];
      if (before != kNone) tree_.add(before + 1, after, -size);
      tree_.add(slot, std::max(slot, after), size);
    }
    auto& runs = runs_[at(op)];
    runs.insert(std::ranges::lower_bound(runs, slot), slot);
    note_repeats(op);
    for (const std::int64_t s : graph_.reads[at(op)]) {
      const auto [from, to] = read_alone(s, slot);
      tree_.add(from, to, graph_.size[at(s)]);
      auto& reads = reads_[at(s)];
      reads.insert(std::ranges::lower_bound(reads, slot), slot);
    }
  }

  void lift_out(OpId op, Slot slot) {
    ++change_count_;
    slot_op_[at(slot)] = kEmpty;
    taken_[at(slot) / kBits] &= ~(std::uint64_t{1} << (at(slot) % kBits));
    if (graph_.is_op(op)) {
      cost_ -= graph_.cost[at(op)];
      tree_.add(slot, slot, -graph_.workspace[at(op)]);
    }
    --run_count_;
    for (const std::int64_t s : graph_.reads[at(op)]) {
      auto& reads = reads_[at(s)];
      reads.erase(std::ranges::lower_bound(reads, slot));
      const auto [from, to] = read_alone(s, slot);
      tree_.add(from, to, -graph_.size[at(s)]);
    }
    auto& runs = runs_[at(op)];
    runs.erase(std::ranges::lower_bound(runs, slot));
    note_repeats(op);
    for (const std::int64_t s : graph_.writes[at(op)]) {
      const auto [before, after] = ends_around(op, s, slot);
      const std::int64_t size = graph_.size[at(s)];
      tree_.add(slot, std::max(slot, after), -size);
      if (before != kNone) tree_.add(before + 1, after, size);
    }
  }

  // Without a run of an op in a slot: the last use before it of the copy that is written
  // before it (-1 if there is none), and the last read after it before the next run of the
  // op (the last use before, if there is none).
  std::pair<Slot, Slot> ends_around(OpId op, std::int64_t storage, Slot slot) const {
    const Slot written = run_before(op, slot);
    const Slot next = run_after(op, slot);
    const auto& reads = reads_[at(storage)];
    const auto here = std::ranges::lower_bound(reads, slot);
    const auto stop =
        next == kNone ? reads.end() : std::lower_bound(here, reads.end(), next);
    Slot before = written;
    if (written != kNone && here != reads.begin()) before = std::max(written, *(here - 1));
    const Slot after = stop == here ? before : *(stop - 1);
    return {before, after};
  }

  // The slots in which a copy is live for the sake of a read in a slot alone, which is not
  // among the reads.
  std::pair<Slot, Slot> read_alone(std::int64_t storage, Slot slot) const {
    const OpId op = graph_.producer[at(storage)];
    const Slot written = op < 0 ? kNone : run_before(op, slot);
    if (written == kNone) return {0, -1};
    const auto& reads = reads_[at(storage)];
    const auto next = std::ranges::lower_bound(reads, slot);
    const Slot rewritten = run_after(op, slot);
    if (next != reads.end() && (rewritten == kNone || *next < rewritten)) return {0, -1};
    const Slot used = next == reads.begin() ? written : std::max(written, *(next - 1));
    return {used + 1, slot};
  }

  void note_repeats(OpId op) {
    const bool is_repeated = runs_[at(op)].size() > 1;
    auto& place = repeated_at_[at(op)];
    if (is_repeated == (place != kNowhere)) return;
    if (is_repeated) {
      place = repeated_.size();
      repeated_.push_back(op);
    } else {
      repeated_at_[at(repeated_.back())] = place;
      repeated_[place] = repeated_.back();
      repeated_.pop_back();
      place = kNowhere;
    }
  }

  OrderGraph graph_;
  MaxTree tree_;
  std::vector<OpId> slot_op_;
  std::vector<std::uint64_t> taken_;
  // Per op the slots of its runs, per storage those of its reads, ascending.
  std::vector<std::vector<Slot>> runs_;
  std::vector<std::vector<Slot>> reads_;
  std::vector<OpId> repeated_;
  std::vector<std::size_t> repeated_at_;
  std::vector<OpId> ordered_;
  std::vector<std::size_t> ordered_at_;
  std::vector<Change> undo_;
  std::vector<std::pair<OpId, Slot>> pending_;
  // Where the caller's work begins in forward and in backward.
  Slot external_[2] = {0, 0};
  std::int64_t cost_ = 0;
  std::size_t run_count_ = 0;
  std::size_t change_count_ = 0;
};

}  // namespace remat
