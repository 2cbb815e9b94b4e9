// Execution of a graph within a limit: native twin of remat.search.eviction_run, which says
// what each step means. Both do the same arithmetic in the same order.

#include "eviction.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "checks.hpp"
#include "watch.hpp"

namespace nb = nanobind;

namespace remat {
namespace {

using Index = std::int64_t;
using Indices = std::vector<Index>;
using Flags = std::vector<bool>;

using Ops = std::tuple<std::vector<Indices>, std::vector<Indices>, Flags,
                       std::vector<std::int64_t>, std::vector<std::int64_t>>;
using Blocks = std::tuple<std::vector<Indices>, Indices, std::vector<std::int64_t>,
                          std::vector<double>>;
using Scores = std::tuple<std::vector<double>, double, double>;
using Bounds = std::tuple<std::int64_t, std::int64_t, std::int64_t>;

constexpr Index kBoundary = -1;
constexpr Index kEnd = -2;
constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr std::size_t kPriceLimit = 24;
constexpr std::size_t kClosureLimit = 64;
constexpr int kRetryLimit = 12;
constexpr double kLastResort = 1e12;
constexpr double kLeastPrice = 1e-9;

// The execution cannot go on within the limit.
struct Stuck {};

// A set of small numbers that is emptied in constant time.
class Marks {
 public:
  explicit Marks(std::size_t count) : seen_(count, 0) {}

  void clear() {
    ++round_;
    count_ = 0;
  }

  bool add(Index item) {
    auto& mark = seen_[static_cast<std::size_t>(item)];
    if (mark == round_) return false;
    mark = round_;
    ++count_;
    return true;
  }

  bool has(Index item) const { return seen_[static_cast<std::size_t>(item)] == round_; }
  std::size_t size() const { return count_; }

 private:
  std::vector<std::uint64_t> seen_;
  std::uint64_t round_ = 0;
  std::size_t count_ = 0;
};

// A set of small numbers that is walked through without those that are not in it.
class Members {
 public:
  explicit Members(std::size_t count) : place_(count, kNone) {}

  void add(Index item) {
    if (place_[static_cast<std::size_t>(item)] != kNone) return;
    place_[static_cast<std::size_t>(item)] = items_.size();
    items_.push_back(item);
  }

  void remove(Index item) {
    auto& place = place_[static_cast<std::size_t>(item)];
    if (place == kNone) return;
    place_[static_cast<std::size_t>(items_.back())] = place;
    items_[place] = items_.back();
    items_.pop_back();
    place = kNone;
  }

  const Indices& items() const { return items_; }

 private:
  static constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();
  std::vector<std::size_t> place_;
  Indices items_;
};

class Execution {
 public:
  Execution(Indices steps, Ops ops, Blocks blocks, Scores scores, Bounds bounds,
            std::optional<Flags> saved, std::optional<double> time_limit_s)
      : watch_(time_limit_s),
        steps_(std::move(steps)),
        reads_(std::move(std::get<0>(ops))),
        writes_(std::move(std::get<1>(ops))),
        may_rerun_(std::move(std::get<2>(ops))),
        cost_(std::move(std::get<3>(ops))),
        workspace_(std::move(std::get<4>(ops))),
        consumers_(std::move(std::get<0>(blocks))),
        producers_(std::move(std::get<1>(blocks))),
        size_(std::move(std::get<2>(blocks))),
        weight_(std::move(std::get<3>(blocks))),
        distance_weight_(std::move(std::get<0>(scores))),
        ancestor_share_(std::get<1>(scores)),
        spare_share_(std::get<2>(scores)),
        limit_(std::get<0>(bounds)),
        used_(std::get<1>(bounds)),
        run_limit_(static_cast<std::size_t>(std::get<2>(bounds))),
        saved_(std::move(saved)),
        live_(size_.size()),
        pinned_(size_.size()),
        evictable_(size_.size()),
        live_evictable_(size_.size()),
        live_lasting_(size_.size()),
        next_use_(size_.size(), kNever),
        wanted_(size_.size()),
        price_(size_.size()),
        uses_(size_.size()),
        storage_marks_(size_.size()),
        op_marks_(reads_.size()),
        stale_(size_.size()) {
    for (std::size_t s = 0; s < size_.size(); ++s) {
      evictable_[s] = producers_[s] >= 0 && may_rerun_[at(producers_[s])];
    }
    for (std::size_t step = steps_.size(); step-- > 0;) {
      for (const Index s : reads(steps_[step])) {
        uses_[at(s)].push_back(static_cast<Index>(step));
      }
      if (steps_[step] == kBoundary) boundary_step_ = step;
    }
    for (std::size_t s = 0; s < size_.size(); ++s) {
      if (!uses_[s].empty()) next_use_[s] = static_cast<double>(uses_[s].back());
    }
  }

  Indices run() {
    for (now_ = 0; now_ < steps_.size(); ++now_) {
      watch_.look();
      const Index op = steps_[now_];
      demand(op);
      after_base(op);
    }
    return std::move(order_);
  }

 private:
  static std::size_t at(Index index) { return static_cast<std::size_t>(index); }

  // The end and the boundary stand behind the ops.
  std::size_t place(Index op) const {
    return op >= 0 ? at(op) : reads_.size() - at(-op);
  }
  const Indices& reads(Index op) const { return reads_[place(op)]; }
  const Indices& writes(Index op) const { return writes_[place(op)]; }

  void after_base(Index op) {
    for (const Index s : reads(op)) {
      auto& uses = uses_[at(s)];
      uses.pop_back();
      if (uses.empty()) {
        stale_.insert(s);
      } else {
        next_use_[at(s)] = static_cast<double>(uses.back());
      }
    }
    if (saved_ && op >= 0 && now_ < boundary_step_) {
      for (const Index s : reads(op)) drop_early(s);
      for (const Index s : writes(op)) drop_early(s);
    }
  }

  void drop_early(Index s) {
    const auto& uses = uses_[at(s)];
    const bool is_read = !uses.empty() && at(uses.back()) <= boundary_step_;
    if (!(*saved_)[at(s)] && live_[at(s)] && evictable_[at(s)] && !is_read) drop(s);
  }

  // When something computed from a storage is used next, and whether it is lost.
  std::pair<double, bool> use_of_others(Index storage) {
    double lost_use = kNever;
    double live_use = kNever;
    storage_marks_.clear();
    storage_marks_.add(storage);
    pending_.assign(1, storage);
    while (!pending_.empty() && storage_marks_.size() < kClosureLimit) {
      const Index source = pending_.back();
      pending_.pop_back();
      for (const Index op : consumers_[at(source)]) {
        if (!may_rerun_[at(op)]) continue;
        for (const Index output : writes(op)) {
          const auto& uses = uses_[at(output)];
          if (live_[at(output)]) {
            if (!uses.empty() && source == storage) {
              live_use = std::min(live_use, static_cast<double>(uses.back()));
            }
          } else if (!uses.empty()) {
            lost_use = std::min(lost_use, static_cast<double>(uses.back()));
          } else if (storage_marks_.add(output)) {
            pending_.push_back(output);
          }
        }
      }
    }
    const bool is_needed = lost_use < kNever;
    return {is_needed ? lost_use : live_use, is_needed};
  }

  void demand(Index target) {
    Indices stack{target};
    want(target, 1);
    std::vector<std::pair<Index, int>> retries;
    while (!stack.empty()) {
      const Index op = stack.back();
      Indices missing;
      for (const Index s : reads(op)) {
        if (!live_[at(s)]) missing.push_back(s);
      }
      if (!missing.empty()) {
        if (++retries_of(retries, op) > kRetryLimit) throw Stuck{};
        const auto ancestors = missing_ancestors(std::move(missing));
        for (auto it = ancestors.rbegin(); it != ancestors.rend(); ++it) {
          want(*it, 1);
          stack.push_back(*it);
        }
        continue;
      }
      stack.pop_back();
      want(op, -1);
      if (op == target || !has_what_is_wanted(op)) execute(op);
    }
  }

  static int& retries_of(std::vector<std::pair<Index, int>>& retries, Index op) {
    for (auto& [other, count] : retries) {
      if (other == op) return count;
    }
    return retries.emplace_back(op, 0).second;
  }

  void want(Index op, std::int64_t change) {
    for (const Index s : reads(op)) wanted_[at(s)] += change;
  }

  bool has_what_is_wanted(Index op) const {
    return std::ranges::all_of(writes(op), [this](Index s) {
      return live_[at(s)] || wanted_[at(s)] == 0;
    });
  }

  std::set<Index> missing_ancestors(Indices pending) {
    std::set<Index> found;
    while (!pending.empty()) {
      const Index op = producers_[at(pending.back())];
      pending.pop_back();
      if (op < 0 || !may_rerun_[at(op)]) throw Stuck{};
      if (found.insert(op).second) {
        for (const Index s : reads(op)) {
          if (!live_[at(s)]) pending.push_back(s);
        }
      }
    }
    return found;
  }

  void execute(Index op) {
    if (op == kEnd) return;
    if (order_.size() >= run_limit_) throw Stuck{};
    std::int64_t needed = op == kBoundary ? 0 : workspace_[at(op)];
    for (const Index s : writes(op)) needed += size_[at(s)];
    const std::int64_t excess = used_ + needed - limit_;
    if (excess > 0) {
      for (const Index s : reads(op)) pinned_[at(s)] = true;
      evict(excess);
      for (const Index s : reads(op)) pinned_[at(s)] = false;
    }
    order_.push_back(op);
    for (const Index s : writes(op)) {
      if (!live_[at(s)]) {
        live_[at(s)] = true;
        (evictable_[at(s)] ? live_evictable_ : live_lasting_).add(s);
        used_ += size_[at(s)];
        mark_stale(s);
      }
    }
  }

  // Notes whose price changes with the liveness of a storage.
  void mark_stale(Index storage) {
    stale_.insert(storage);
    mark_around(storage, [this](Index s, const auto& visit) {
      const Index producer = producers_[at(s)];
      if (producer < 0) return;
      for (const Index other : reads(producer)) visit(other);
    });
    mark_around(storage, [this](Index s, const auto& visit) {
      for (const Index op : consumers_[at(s)]) {
        for (const Index other : writes(op)) visit(other);
      }
    });
  }

  template <typename Neighbours>
  void mark_around(Index storage, const Neighbours& neighbours) {
    storage_marks_.clear();
    pending_.assign(1, storage);
    while (!pending_.empty() && storage_marks_.size() < kClosureLimit) {
      const Index current = pending_.back();
      pending_.pop_back();
      neighbours(current, [this](Index other) {
        if (live_[at(other)]) {
          stale_.insert(other);
        } else if (storage_marks_.add(other)) {
          pending_.push_back(other);
        }
      });
    }
  }

  void update_price(Index storage) {
    const Index op = producers_[at(storage)];
    if (op < 0) return;
    const bool is_paid = std::ranges::any_of(writes(op), [this](Index s) {
      return !live_[at(s)] && !uses_[at(s)].empty();
    });
    double price =
        ancestors_price(op) + (is_paid ? 0.0 : static_cast<double>(cost_[at(op)]));
    price = std::max(price, kLeastPrice);
    if (uses_[at(storage)].empty()) {
      const auto [use, is_needed] = use_of_others(storage);
      next_use_[at(storage)] = use;
      price *= is_needed ? 1.0 : spare_share_;
    }
    price_[at(storage)] = price;
  }

  double ancestors_price(Index op) {
    double price = 0.0;
    op_marks_.clear();
    op_marks_.add(op);
    pending_.assign(1, op);
    for (std::size_t next = 0; next < pending_.size(); ++next) {
      for (const Index s : reads(pending_[next])) {
        if (live_[at(s)]) continue;
        const Index ancestor = producers_[at(s)];
        if (ancestor < 0 || op_marks_.has(ancestor)) continue;
        const auto cost = static_cast<double>(cost_[at(ancestor)]);
        if (!uses_[at(s)].empty()) {
          if (ancestor_share_ == 0.0) continue;
          price += ancestor_share_ * cost;
        } else {
          price += cost;
        }
        op_marks_.add(ancestor);
        pending_.push_back(ancestor);
      }
      if (op_marks_.size() > kPriceLimit) break;
    }
    return price;
  }

  void evict(std::int64_t excess) {
    excess = lose_what_runs_once(excess, true);
    if (excess <= 0) return;
    const auto now = static_cast<double>(now_);
    victims_.clear();
    for (const Index s : live_evictable_.items()) {
      if (!pinned_[at(s)]) {
        victims_.emplace_back(0.0, s);
        if (next_use_[at(s)] <= now) stale_.insert(s);
      }
    }
    for (const Index s : stale_.items()) {
      if (live_[at(s)]) update_price(s);
    }
    stale_.clear();
    for (auto& [score, storage] : victims_) score = score_of(at(storage), now);
    // Victims leave in the order of a sort, of which only the start is needed.
    const auto later = std::greater<>{};
    std::ranges::make_heap(victims_, later);
    while (excess > 0 && !victims_.empty()) {
      std::ranges::pop_heap(victims_, later);
      const Index storage = victims_.back().second;
      victims_.pop_back();
      if (size_[at(storage)] != 0) {
        excess -= size_[at(storage)];
        drop(storage);
      }
    }
    if (excess > 0 && lose_what_runs_once(excess, false) > 0) throw Stuck{};
  }

  double score_of(std::size_t s, double now) const {
    const bool is_wanted = wanted_[s] > 0;
    const double distance = next_use_[s] - now;
    double weight = kNever;
    if (is_wanted) {
      weight = distance_weight_[1];
    } else if (std::isfinite(distance)) {
      weight = distance_weight_[static_cast<std::size_t>(std::max(distance, 1.0))];
    }
    return price_[s] * (is_wanted ? kLastResort : 1.0) / weight_[s] / weight;
  }

  void drop(Index s) {
    live_[at(s)] = false;
    live_evictable_.remove(s);
    live_lasting_.remove(s);
    used_ -= size_[at(s)];
    mark_stale(s);
  }

  // Evicts values that cannot come back and that nothing depends on any more.
  std::int64_t lose_what_runs_once(std::int64_t excess, bool freely) {
    if (freely && now_ > boundary_step_) return excess;
    Indices found;
    for (const Index s : live_lasting_.items()) {
      if (!pinned_[at(s)]) found.push_back(s);
    }
    std::ranges::sort(found);
    for (const Index s : found) {
      if (excess <= 0) break;
      if (size_[at(s)] != 0 && can_lose(s) &&
          (!freely || frozen_bytes(s) <= size_[at(s)])) {
        for (const Index op : consumers_[at(s)]) freeze(op);
        excess -= size_[at(s)];
        drop(s);
      }
    }
    return excess;
  }

  std::int64_t frozen_bytes(Index storage) {
    storage_marks_.clear();
    std::int64_t total = 0;
    for (const Index op : consumers_[at(storage)]) {
      for (const Index output : writes(op)) {
        if (storage_marks_.add(output) && !uses_[at(output)].empty() &&
            evictable_[at(output)]) {
          total += size_[at(output)];
        }
      }
    }
    return total;
  }

  bool can_lose(Index s) {
    if (!uses_[at(s)].empty() || wanted_[at(s)] != 0) return false;
    return !use_of_others(s).second;
  }

  void freeze(Index op) {
    may_rerun_[at(op)] = false;
    for (const Index output : writes(op)) {
      evictable_[at(output)] = false;
      if (live_[at(output)]) {
        live_evictable_.remove(output);
        live_lasting_.add(output);
      }
    }
  }

  // Storages whose price is out of date; the order in which they are renewed is free.
  class Stale {
   public:
    explicit Stale(std::size_t count) : marks_(count) { marks_.clear(); }
    void insert(Index s) {
      if (marks_.add(s)) items_.push_back(s);
    }
    const Indices& items() const { return items_; }
    void clear() {
      marks_.clear();
      items_.clear();
    }

   private:
    Marks marks_;
    Indices items_;
  };

  Watch watch_;
  Indices steps_;
  std::vector<Indices> reads_;
  std::vector<Indices> writes_;
  Flags may_rerun_;
  std::vector<std::int64_t> cost_;
  std::vector<std::int64_t> workspace_;
  std::vector<Indices> consumers_;
  Indices producers_;
  std::vector<std::int64_t> size_;
  std::vector<double> weight_;
  std::vector<double> distance_weight_;
  double ancestor_share_;
  double spare_share_;
  std::int64_t limit_;
  std::int64_t used_;
  std::size_t run_limit_;
  std::optional<Flags> saved_;
  Flags live_;
  Flags pinned_;
  Flags evictable_;
  // Those of the live storages that are evictable, and the others.
  Members live_evictable_;
  Members live_lasting_;
  std::vector<double> next_use_;
  std::vector<std::int64_t> wanted_;
  std::vector<double> price_;
  // Per storage the steps that read it, the next one last.
  std::vector<Indices> uses_;
  Marks storage_marks_;
  Marks op_marks_;
  Stale stale_;
  Indices pending_;
  std::vector<std::pair<double, Index>> victims_;
  Indices order_;
  std::size_t now_ = 0;
  std::size_t boundary_step_ = 0;
};

// As remat.search.eviction_run.check_execution.
void check_execution(const Indices& steps, const Ops& ops, const Blocks& blocks,
                     const Scores& scores, const Bounds& bounds,
                     const std::optional<Flags>& saved) {
  const auto& [reads, writes, may_rerun, costs, workspaces] = ops;
  const auto& [consumers, producers, sizes, weights] = blocks;
  const auto& [distance_weights, ancestor_share, spare_share] = scores;
  const auto& [limit, resident, run_limit] = bounds;
  const std::size_t count = costs.size();
  const std::size_t storages = sizes.size();
  require(reads.size() == count + 2 && writes.size() == count + 2 &&
              may_rerun.size() == count && workspaces.size() == count,
          "the lists of ops differ in length");
  require(consumers.size() == storages && producers.size() == storages &&
              weights.size() == storages && (!saved || saved->size() == storages),
          "the lists of storages differ in length");
  check_indices(steps, count, "a step names an op that does not exist", kEnd);
  require(std::ranges::count(steps, kBoundary) == 1, "the steps need one boundary");
  for (const auto* const lists : {&reads, &writes}) {
    for (const auto& list : *lists) {
      check_indices(list, storages, "there is no such storage");
    }
  }
  for (const auto& list : consumers) check_indices(list, count, "there is no such op");
  check_indices(producers, count, "there is no such op", -1);
  const Capped bytes = total(sizes) + total(workspaces) + Capped(resident);
  require(bytes.value() <= kMostTotal, "sizes add up to more than 2**60");
  require(total(costs).value() <= kMostTotal, "times add up to more than 2**60");
  require(distance_weights.size() > steps.size() && distance_weights.size() > 1,
          "a distance has no weight");
  for (const auto* const numbers : {&weights, &distance_weights}) {
    for (const double weight : *numbers) {
      require(weight > 0.0 && std::isfinite(weight), "a weight is not above 0 and finite");
    }
  }
  check_share(ancestor_share);
  check_share(spare_share);
  require(limit >= -kMostTotal, "the limit is less than -2**60");
  require(run_limit >= 0, "the limit of runs is negative");
}

std::optional<Indices> run_evicting(Indices steps, Ops ops, Blocks blocks,
                                    Scores scores, Bounds bounds,
                                    std::optional<Flags> saved,
                                    std::optional<double> time_limit_s) {
  check_execution(steps, ops, blocks, scores, bounds, saved);
  try {
    return Execution(std::move(steps), std::move(ops), std::move(blocks),
                     std::move(scores), bounds, std::move(saved), time_limit_s)
        .run();
  } catch (const Stuck&) {
    return std::nullopt;
  } catch (const TimeUp&) {
    return std::nullopt;
  }
}

}  // namespace

void bind_eviction(nb::module_& module) {
  module.def("run_evicting", &run_evicting, nb::arg("steps"), nb::arg("ops"),
             nb::arg("blocks"), nb::arg("scores"), nb::arg("bounds"),
             nb::arg("saved").none(), nb::arg("time_limit_s").none());
}

}  // namespace remat
