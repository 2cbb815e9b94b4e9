// Search among orders of runs on one device: small changes, weighed at once by OrderTable. See
// remat.search.local_moves for what the functions mean.

#include "local_search.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "checks.hpp"
#include "order_table.hpp"
#include "watch.hpp"

namespace nb = nanobind;

namespace remat {
namespace {

using Indices = std::vector<std::int64_t>;
using Bytes = std::vector<std::int64_t>;
using Flags = std::vector<bool>;
using Numbers = std::tuple<std::vector<Indices>, std::vector<Indices>, Bytes, Bytes, Bytes,
                           Flags, std::int64_t>;
// Which ops may run again, are ordered, are the caller's; how many are of forward.
using Passes = std::tuple<Flags, Flags, Flags, std::int64_t>;
// The budget, the time that is enough, the effort, the seed.
using Aim = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;
// Kind, number of a run in the order, and an op or another run.
using Move = std::tuple<std::int64_t, std::int64_t, std::int64_t>;
using Weighed = std::tuple<bool, std::int64_t, std::int64_t>;

constexpr std::int64_t kBoundary = -1;
constexpr std::int64_t kMostEffort = std::int64_t{1} << 27;
constexpr std::size_t kMostRuns = std::size_t{1} << 24;
constexpr int kMostOf = 64;  // runs of each op, at most

template <typename Integer>
std::size_t at(Integer index) {
  return static_cast<std::size_t>(index);
}

OrderGraph graph_of(Numbers numbers, Passes passes) {
  OrderGraph graph;
  graph.reads = std::move(std::get<0>(numbers));
  graph.writes = std::move(std::get<1>(numbers));
  graph.size = std::move(std::get<2>(numbers));
  graph.cost = std::move(std::get<3>(numbers));
  graph.workspace = std::move(std::get<4>(numbers));
  graph.stays_once = std::move(std::get<5>(numbers));
  graph.resident_bytes = std::get<6>(numbers);
  graph.may_rerun = std::move(std::get<0>(passes));
  graph.is_ordered = std::move(std::get<1>(passes));
  graph.is_external = std::move(std::get<2>(passes));
  graph.forward_count = std::get<3>(passes);
  const std::size_t count = graph.cost.size();
  require(graph.reads.size() == count + 2 && graph.writes.size() == count + 2 &&
              graph.workspace.size() == count && graph.stays_once.size() == count &&
              graph.may_rerun.size() == count && graph.is_ordered.size() == count &&
              graph.is_external.size() == count,
          "the lists of ops differ in length");
  require(count < kMostRuns && graph.size.size() < kMostRuns, "there are too many ops");
  require(graph.forward_count >= 0 && at(graph.forward_count) <= count,
          "there are not so many forward ops");
  for (const auto* lists : {&graph.reads, &graph.writes}) {
    for (const auto& list : *lists) {
      check_indices(list, graph.size.size(), "there is no such storage");
      Indices sorted = list;
      std::ranges::sort(sorted);
      require(std::ranges::adjacent_find(sorted) == sorted.end(),
              "an op names a storage twice");
    }
  }
  require(graph.writes[count].empty(), "the end writes a storage");
  const Capped bytes =
      total(graph.size) + total(graph.workspace) + Capped(graph.resident_bytes);
  require(bytes.value() <= kMostTotal, "sizes add up to more than 2**60");
  require((total(graph.cost) * Capped(kMostOf)).value() <= kMostTotal,
          "times add up to more than 2**60");
  graph.producer.assign(graph.size.size(), -1);
  for (std::size_t op = 0; op < count + 2; ++op) {
    for (const std::int64_t s : graph.writes[op]) {
      require(graph.producer[at(s)] < 0, "a storage is written twice");
      graph.producer[at(s)] = static_cast<OpId>(op);
    }
  }
  return graph;
}

// An order that may be changed: each run finds what it reads, each pass has its own ops.
std::vector<OpId> order_of(const OrderGraph& graph, const Indices& order) {
  const std::size_t count = graph.cost.size();
  check_indices(order, count, "the order holds an op that the graph does not have", kBoundary);
  require(order.size() < kMostRuns, "there are too many runs");
  require(std::ranges::count(order, kBoundary) == 1, "the order needs one boundary");
  std::vector<int> runs(count + 2, 0);
  std::vector<OpId> found;
  found.reserve(order.size());
  OpId last_ordered = -1;
  bool is_backward = false;
  bool is_callers = false;
  const auto finds = [&](std::size_t op) {
    return std::ranges::all_of(graph.reads[op], [&](std::int64_t s) {
      const OpId maker = graph.producer[at(s)];
      return maker >= 0 && runs[at(maker)] > 0;
    });
  };
  const auto has_effects = [&](std::size_t first, std::size_t stop) {
    for (std::size_t op = first; op < stop; ++op) {
      if (graph.stays_once[op] && runs[op] == 0) return false;
    }
    return true;
  };
  for (const std::int64_t step : order) {
    const OpId op = step == kBoundary ? graph.boundary() : static_cast<OpId>(step);
    require(finds(at(op)), "a storage is read before it is written");
    if (op == graph.boundary()) {
      require(has_effects(0, at(graph.forward_count)), "an op has not run in its pass");
      is_backward = true;
      is_callers = false;
    } else {
      require(is_backward || graph.is_forward(op), "an op runs before its pass");
      require(graph.is_external[at(op)] || !is_callers, "an op runs after the caller's");
      is_callers = graph.is_external[at(op)];
      require(runs[at(op)] == 0 || (graph.may_rerun[at(op)] && !is_callers),
              "an op runs again that may not");
      require(runs[at(op)] < kMostOf, "an op runs too often");
      if (graph.is_ordered[at(op)] && runs[at(op)] == 0) {
        require(op > last_ordered, "ordered ops run in another order");
        last_ordered = op;
      }
    }
    ++runs[at(op)];
    found.push_back(op);
  }
  require(finds(count), "a final output is missing");
  require(has_effects(0, count), "an op has not run in its pass");
  return found;
}

Indices plain_order(const OrderGraph& graph, const std::vector<OpId>& order) {
  Indices found;
  found.reserve(order.size());
  for (const OpId op : order) {
    found.push_back(op == graph.boundary() ? kBoundary : static_cast<std::int64_t>(op));
  }
  return found;
}

// The numbers of splitmix64: the same on every machine.
class Chance {
 public:
  explicit Chance(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    state_ += 0x9E3779B97F4A7C15U;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31U);
  }

  std::size_t below(std::size_t count) {
    return static_cast<std::size_t>((next() >> 32U) * static_cast<std::uint64_t>(count) >>
                                    32U);
  }

  // From 0 to less than 1.
  double share() { return static_cast<double>(next() >> 11U) * 0x1.0p-53; }

  bool one_in(std::size_t count) { return below(count) == 0; }

 private:
  std::uint64_t state_;
};

class Search {
 public:
  Search(OrderTable table, const Aim& aim, double first_heat, double last_heat,
         std::optional<double> time_limit_s)
      : watch_(time_limit_s),
        table_(std::move(table)),
        graph_(table_.graph()),
        budget_(std::get<0>(aim)),
        enough_ns_(std::get<1>(aim)),
        effort_(std::get<2>(aim)),
        first_heat_(first_heat),
        last_heat_(last_heat),
        chance_(static_cast<std::uint64_t>(std::get<3>(aim))),
        changes_before_(table_.changes()) {
    std::int64_t sum = 0;
    for (std::size_t s = 0; s < graph_.size.size(); ++s) {
      const OpId op = graph_.producer[s];
      if (!may_rerun(op) || graph_.size[s] == 0) continue;
      sum += graph_.size[s];
      droppable_.push_back(static_cast<std::int64_t>(s));
      bytes_up_to_.push_back(sum);
    }
    for (std::size_t k = 0; k < kLogs; ++k) {
      logs_[k] = -std::log((static_cast<double>(k) + 0.5) / static_cast<double>(kLogs));
    }
  }

  void run() {
    keep();
    const std::int64_t step = std::max<std::int64_t>(1, effort_ / kCoolings);
    const double ratio = first_heat_ > 0.0
                             ? std::pow(std::max(last_heat_, kLeastHeat) / first_heat_,
                                        1.0 / static_cast<double>(kCoolings))
                             : 1.0;
    heat_ = first_heat_;
    std::int64_t next = step;
    try {
      while (spent() < effort_ && !is_enough()) {
        for (; spent() >= next; next += step) heat_ *= ratio;
        const std::int64_t before = spent();
        ++weighed_;
        round();
        watch_.spend((spent() - before) * kStepsAChange);
      }
    } catch (const TimeUp&) {
      // The best order is complete: time is looked at between rounds.
    }
  }

  std::tuple<Indices, std::int64_t, std::int64_t, std::int64_t> answer() const {
    return {plain_order(graph_, best_), best_cost_, best_peak_, spent()};
  }

 private:
  static constexpr std::size_t kLogs = 1024;
  static constexpr std::int64_t kCoolings = 256;
  static constexpr double kLeastHeat = 1e-9;
  static constexpr std::int64_t kStepsAChange = 256;
  static constexpr std::size_t kSamples = 20;
  static constexpr std::size_t kMostPut = 96;
  static constexpr int kDeepest = 24;
  static constexpr int kMostAgain = 48;
  static constexpr std::size_t kRoom = 96;
  static constexpr double kHopeless = std::numeric_limits<double>::infinity();

  // Nothing can be put where no slot is left; room is made before this slot.
  struct NoRoom {
    Slot slot;
  };

  // Runs put in and taken out, and those thought of.
  std::int64_t spent() const {
    return weighed_ + static_cast<std::int64_t>(table_.changes() - changes_before_);
  }

  bool fits() const { return table_.peak() <= budget_; }
  bool is_enough() const { return best_peak_ <= budget_ && best_cost_ <= enough_ns_; }

  void keep() {
    best_ = table_.order();
    best_cost_ = table_.cost();
    best_peak_ = table_.peak();
  }

  void round() {
    const bool is_over = !fits();
    // As long as nothing fits, the peak is what is to be smaller, whatever that costs.
    limit_ = is_over ? table_.peak() - (chance_.one_in(4) ? 0 : 1) : budget_;
    const std::int64_t before = table_.cost();
    const double slack = heat_ * logs_[chance_.below(kLogs)];
    most_cost_ = is_over ? std::numeric_limits<std::int64_t>::max()
                         : before + static_cast<std::int64_t>(slack);
    bool is_good = false;
    try {
      is_good = is_over ? lower() : change();
    } catch (const NoRoom& full) {
      table_.roll_back(0);
      respace(full.slot);
      return;
    }
    if (!is_good) {
      table_.roll_back(0);
      return;
    }
    table_.accept();
    const bool is_better = is_over ? std::pair{table_.peak(), table_.cost()} <
                                         std::pair{best_peak_, best_cost_}
                                   : best_peak_ > budget_ || table_.cost() < best_cost_;
    if (is_better) keep();
  }

  void respace(Slot slot) {
    std::vector<OpId> order = table_.order();
    std::size_t crowded = 0;
    for (Slot before = table_.taken_before(slot); before >= 0;
         before = table_.taken_before(before)) {
      ++crowded;
      if (before == 0) break;
    }
    table_.assign(order, crowded, kRoom);
    // As long as it takes, it is not what a change takes.
    changes_before_ += order.size() + 1;
    weighed_ += static_cast<std::int64_t>(order.size() / 4);
  }

  // One change of an order that fits; false if it does not fit then, or costs too much.
  bool change() {
    const std::size_t kind = chance_.below(16);
    if (kind < 9) {
      if (!ruin()) return shift();
      if (!repair()) return false;
    } else if (kind < 11) {
      if (!drop_any()) return false;
      if (!repair()) return false;
      fill(8);
    } else if (kind < 12) {
      // Both: something is dropped, something else kept for it.
      ruin();
      if (!drop_any() || !repair()) return false;
    } else {
      if (!shift()) return false;
      if (!repair()) return false;
    }
    fill(4);
    return table_.cost() <= most_cost_;
  }

  bool lower() {
    const std::size_t kind = chance_.below(8);
    if (kind == 0) {
      ruin();
    } else if (kind < 4) {
      shift();
    }
    if (table_.run_count() > 8 * graph_.cost.size() + 64) ruin();
    return repair();
  }

  // Takes out a few runs that are near each other, and have others of the same ops before.
  bool ruin() {
    const auto& repeated = table_.repeated();
    if (repeated.empty()) return false;
    const OpId op = repeated[chance_.below(repeated.size())];
    const auto& runs = table_.runs(op);
    Slot here = runs[1 + chance_.below(runs.size() - 1)];
    if (!table_.may_take_out(op, here)) return false;
    table_.take_out_all(op, here);
    std::size_t more = chance_.below(4) == 0 ? chance_.below(6) : 0;
    const bool is_forwards = chance_.one_in(2);
    for (int step = 0; step < 12 && more > 0; ++step) {
      here = is_forwards ? table_.taken_after(here) : table_.taken_before(here);
      if (here < 0) break;
      const OpId next = table_.op_at(here);
      if (graph_.is_op(next) && table_.run_before(next, here) >= 0 && table_.may_take_out(next, here)) {
        table_.take_out_all(next, here);
        --more;
      }
    }
    return true;
  }

  // Drops a storage between two uses, and has it made again for the second.
  bool drop_any() {
    if (droppable_.empty()) return false;
    const Slot last = table_.end_slot();
    for (int attempt = 0; attempt < 8; ++attempt) {
      const Slot slot = static_cast<Slot>(chance_.below(at(last)));
      const std::int64_t storage = sampled();
      const auto [used, next] = table_.gap_at(storage, slot);
      if (next < 0) continue;
      put_count_ = 0;
      return provide(graph_.producer[at(storage)], next, 0);
    }
    return false;
  }

  std::int64_t sampled() {
    // By bytes, and now and then any.
    if (chance_.one_in(4)) return droppable_[chance_.below(droppable_.size())];
    const auto wanted =
        static_cast<std::int64_t>(chance_.share() * static_cast<double>(bytes_up_to_.back()));
    const auto it = std::ranges::upper_bound(bytes_up_to_, wanted);
    return it == bytes_up_to_.end() ? droppable_.back()
                                    : droppable_[at(it - bytes_up_to_.begin())];
  }

  // Moves one run somewhere else.
  bool shift() {
    const Slot last = table_.end_slot();
    for (int attempt = 0; attempt < 6; ++attempt) {
      Slot from = table_.taken_after(static_cast<Slot>(chance_.below(at(last))));
      if (from < 0) continue;
      const OpId op = table_.op_at(from);
      if (!graph_.is_op(op) || graph_.is_external[at(op)]) continue;
      Slot before = OrderTable::kNone;
      const std::size_t kind = chance_.below(4);
      if (kind == 0) {
        before = first_reader(op, from);
      } else if (kind == 1) {
        before = table_.taken_after(last_maker(op, from));
      } else {
        const std::size_t distance =
            1 + chance_.below(std::size_t{1} << (1 + chance_.below(6)));
        before = from;
        for (std::size_t k = 0; k < distance && before >= 0; ++k) {
          const Slot step =
              kind == 2 ? table_.taken_after(before) : table_.taken_before(before);
          if (step < 0) break;
          before = step;
        }
      }
      if (before < 0 || before == from) continue;
      const Slot to = table_.slot_before(before);
      if (to < 0) throw NoRoom{before};
      if (table_.taken_before(to) == from || !table_.may_move(op, from, to)) continue;
      table_.move(op, from, to);
      // Moved before a run of its own, or behind one, it may have no readers left.
      drop_idle(op, to);
      return true;
    }
    return false;
  }

  void drop_idle(OpId op, Slot slot) {
    if (table_.is_idle(op, slot)) {
      table_.take_out_all(op, slot);
      return;
    }
    const Slot before = table_.run_before(op, slot);
    if (before >= 0 && table_.is_idle(op, before)) table_.take_out_all(op, before);
  }

  Slot first_reader(OpId op, Slot slot) const {
    Slot first = OrderTable::kNone;
    for (const std::int64_t s : graph_.writes[at(op)]) {
      const auto& reads = table_.reads(s);
      const auto it = std::ranges::upper_bound(reads, slot);
      if (it != reads.end() && (first < 0 || *it < first)) first = *it;
    }
    return first;
  }

  Slot last_maker(OpId op, Slot slot) const {
    Slot last = graph_.is_forward(op) ? 0 : table_.boundary_slot();
    for (const std::int64_t s : graph_.reads[at(op)]) {
      const OpId maker = graph_.producer[at(s)];
      const Slot made = maker < 0 ? OrderTable::kNone : table_.run_before(maker, slot);
      last = std::max(last, made);
    }
    return last;
  }

  // Makes room where memory is fullest until all is within the limit.
  bool repair() {
    put_count_ = 0;
    while (table_.peak() > limit_) {
      if (table_.cost() > most_cost_ || droppable_.empty()) return false;
      const Slot full = table_.tree().fullest();
      std::int64_t best = -1;
      Slot best_next = OrderTable::kNone;
      double best_score = kHopeless;
      const std::int64_t excess = table_.peak() - limit_;
      weighed_ += kSamples / 4;
      const auto consider = [&](std::int64_t storage) {
        const auto [used, next] = table_.gap_at(storage, full);
        if (next < 0) return;
        const OpId op = graph_.producer[at(storage)];
        int count = 0;
        const double cost = time_again(op, next, 0, count);
        if (cost == kHopeless) return;
        const double gained =
            static_cast<double>(std::min(excess, graph_.size[at(storage)]));
        const double score =
            (cost + 1.0) / gained *
            (1.0 + static_cast<double>(chance_.below(256)) / 256.0 * noise_);
        if (score < best_score) {
          best_score = score;
          best = storage;
          best_next = next;
        }
      };
      noise_ = chance_.one_in(3) ? 4.0 : 0.5;
      if (droppable_.size() <= kSamples) {
        for (const std::int64_t storage : droppable_) consider(storage);
      } else {
        for (std::size_t k = 0; k < kSamples; ++k) consider(sampled());
        if (best < 0) {
          // All of them, from anywhere on.
          const std::size_t start = chance_.below(droppable_.size());
          weighed_ += static_cast<std::int64_t>(droppable_.size() / 4);
          for (std::size_t k = 0; k < droppable_.size(); ++k) {
            const std::size_t place = start + k;
            consider(droppable_[place < droppable_.size() ? place
                                                          : place - droppable_.size()]);
          }
        }
      }
      if (best < 0 || !provide(graph_.producer[at(best)], best_next, 0)) return false;
    }
    return true;
  }

  // What it takes to run an op again right before a slot, about.
  double time_again(OpId op, Slot slot, int depth, int& count) const {
    if (!may_rerun(op) || depth > kDeepest || ++count > kMostAgain) return kHopeless;
    ++weighed_;
    double cost = static_cast<double>(graph_.cost[at(op)]);
    if (cost > static_cast<double>(most_cost_ - table_.cost())) return kHopeless;
    for (const std::int64_t s : graph_.reads[at(op)]) {
      if (!needs_again(s, slot)) continue;
      cost += time_again(graph_.producer[at(s)], slot, depth + 1, count);
      if (cost == kHopeless) return cost;
    }
    return cost;
  }

  bool may_rerun(OpId op) const {
    return op >= 0 && graph_.is_op(op) && graph_.may_rerun[at(op)] &&
           !graph_.is_external[at(op)];
  }

  // Whether memory has no room for keeping a storage up to a slot for the sake of a read there.
  bool needs_again(std::int64_t s, Slot slot) const {
    const OpId maker = graph_.producer[at(s)];
    if (!may_rerun(maker)) return false;
    const Slot written = table_.run_before(maker, slot);
    const auto& reads = table_.reads(s);
    const auto it = std::ranges::lower_bound(reads, slot);
    const Slot rewritten = table_.run_after(maker, slot - 1);
    if (it != reads.end() && (rewritten < 0 || *it <= rewritten)) return false;
    const Slot used = it == reads.begin() ? written : std::max(written, *(it - 1));
    return table_.tree().most_in(used + 1, slot - 1) + graph_.size[at(s)] > limit_;
  }

  // Puts a run of an op right before a slot, and of what it needs where that is not kept.
  bool provide(OpId op, Slot before, int depth) {
    if (++put_count_ > kMostPut || depth > kDeepest) return false;
    const Slot slot = table_.slot_before(before);
    if (slot < 0) throw NoRoom{before};
    if (!table_.may_put(op, slot) || table_.runs(op).size() >= at(kMostOf)) return false;
    const Slot earlier = table_.run_before(op, slot);
    const Slot base = table_.taken_before(slot);
    // Asked before the run is there: its own reads would count.
    std::vector<OpId> makers;
    for (const std::int64_t s : graph_.reads[at(op)]) {
      const bool is_again = needs_again(s, slot) != chance_.one_in(64);
      const OpId maker = graph_.producer[at(s)];
      if (is_again && may_rerun(maker)) makers.push_back(maker);
    }
    table_.put(op, slot);
    for (const OpId maker : makers) {
      // A run that was put there for another of them will do.
      if (table_.run_before(maker, slot) > base) continue;
      if (!provide(maker, slot, depth + 1)) return false;
    }
    // What served only reads that the new run serves now is not needed any more.
    if (earlier >= 0 && table_.is_idle(op, earlier)) table_.take_out_all(op, earlier);
    return table_.cost() <= most_cost_;
  }

  // Takes out runs that memory can do without.
  void fill(std::size_t attempts) {
    weighed_ += static_cast<std::int64_t>(attempts / 2);
    for (std::size_t k = 0; k < attempts; ++k) {
      const auto& repeated = table_.repeated();
      if (repeated.empty()) return;
      const OpId op = repeated[chance_.below(repeated.size())];
      const auto& runs = table_.runs(op);
      const Slot slot = runs[1 + chance_.below(runs.size() - 1)];
      if (!table_.may_take_out(op, slot) || !can_keep(op, slot)) continue;
      const std::size_t mark = table_.mark();
      table_.take_out_all(op, slot);
      if (table_.peak() > limit_) table_.roll_back(mark);
    }
  }

  // Whether the copies before those of a run may stay up to it, as far as that is known.
  bool can_keep(OpId op, Slot slot) const {
    const Slot written = table_.run_before(op, slot);
    const Slot next = table_.run_after(op, slot);
    for (const std::int64_t s : graph_.writes[at(op)]) {
      const auto& reads = table_.reads(s);
      const auto it = std::ranges::upper_bound(reads, slot);
      if (it == reads.end() || (next >= 0 && *it > next)) continue;
      const Slot used = it == reads.begin() ? written : std::max(written, *(it - 1));
      // The last taken slot before it may hold a run that leaves as well.
      if (table_.tree().most_in(used + 1, (used + slot) / 2) + graph_.size[at(s)] > limit_) {
        return false;
      }
    }
    return true;
  }

  Watch watch_;
  OrderTable table_;
  const OrderGraph& graph_;
  std::int64_t budget_;
  std::int64_t enough_ns_;
  std::int64_t effort_;
  double first_heat_;
  double last_heat_;
  double heat_ = 0.0;
  double noise_ = 0.5;
  Chance chance_;
  std::array<double, kLogs> logs_{};
  std::vector<std::int64_t> droppable_;
  std::vector<std::int64_t> bytes_up_to_;
  std::vector<OpId> best_;
  std::int64_t best_cost_ = 0;
  std::int64_t best_peak_ = 0;
  std::int64_t limit_ = 0;
  std::int64_t most_cost_ = 0;
  std::size_t put_count_ = 0;
  mutable std::int64_t weighed_ = 0;
  std::size_t changes_before_;
};

std::vector<Weighed> weigh_moves(Numbers numbers, Passes passes, Indices order,
                                 std::vector<Move> moves) {
  OrderGraph graph = graph_of(std::move(numbers), std::move(passes));
  const std::vector<OpId> start = order_of(graph, order);
  OrderTable table(std::move(graph));
  table.assign(start);
  std::vector<Weighed> found;
  for (const auto& [kind, number, target] : moves) {
    require(kind >= 0 && kind <= 2, "there is no such kind of move");
    // A run by its number, or the end.
    const auto slot_of = [&table](std::int64_t index) {
      require(index >= 0 && at(index) <= table.run_count(), "there is no such run");
      Slot slot = 0;
      if (table.op_at(0) == OrderTable::kEmpty) slot = table.taken_after(0);
      for (; index > 0; --index) slot = table.taken_after(slot);
      return slot;
    };
    Slot slot = slot_of(number);
    if (kind != 0 && table.slot_before(kind == 1 ? slot : slot_of(target)) < 0) {
      table.assign(table.order());
      slot = slot_of(number);
    }
    bool is_taken = false;
    if (kind == 0) {
      const OpId op = table.op_at(slot);
      is_taken = table.may_take_out(op, slot);
      if (is_taken) table.take_out(op, slot);
    } else if (kind == 1) {
      require(is_index(target, table.graph().cost.size()), "there is no such op");
      const auto op = static_cast<OpId>(target);
      const Slot free = table.slot_before(slot);
      is_taken = table.may_put(op, free) && table.runs(op).size() < at(kMostOf);
      if (is_taken) table.put(op, free);
    } else {
      const OpId op = table.op_at(slot);
      const Slot free = table.slot_before(slot_of(target));
      is_taken = table.may_move(op, slot, free);
      if (is_taken) table.move(op, slot, free);
    }
    table.accept();
    found.emplace_back(is_taken, table.cost(), table.peak());
  }
  return found;
}

std::tuple<Indices, std::int64_t, std::int64_t, std::int64_t> search_orders(
    Numbers numbers, Passes passes, Indices order, Aim aim, double first_heat,
    double last_heat, std::optional<double> time_limit_s) {
  const auto& [budget, enough, effort, seed] = aim;
  require(budget >= -kMostTotal && budget <= kMostTotal, "the budget is more than 2**60");
  require(effort >= 0 && effort <= kMostEffort, "the effort is not 0 to 2**27");
  require(first_heat >= 0.0 && last_heat >= 0.0 && first_heat <= 1e18 && last_heat <= 1e18,
          "a heat is not 0 to 1e18");
  static_cast<void>(enough);
  static_cast<void>(seed);
  OrderGraph graph = graph_of(std::move(numbers), std::move(passes));
  const std::vector<OpId> start = order_of(graph, order);
  OrderTable table(std::move(graph));
  table.assign(start);
  Search search(std::move(table), aim, first_heat, last_heat, time_limit_s);
  search.run();
  return search.answer();
}

}  // namespace

void bind_local_search(nb::module_& module) {
  module.def("weigh_moves", &weigh_moves, nb::arg("numbers"), nb::arg("passes"),
             nb::arg("order"), nb::arg("moves"));
  module.def("search_orders", &search_orders, nb::arg("numbers"), nb::arg("passes"),
             nb::arg("order"), nb::arg("aim"), nb::arg("first_heat"), nb::arg("last_heat"),
             nb::arg("time_limit_s").none());
}

}  // namespace remat
