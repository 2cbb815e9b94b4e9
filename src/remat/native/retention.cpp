// How long copies stay, and keeping more of them: native twin of remat.search.retention_table,
// which says what each step means. Both do the same arithmetic in the same order.

#include "retention.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
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
using Bytes = std::vector<std::int64_t>;

using Numbers = std::tuple<std::vector<Indices>, std::vector<Indices>, Bytes, Bytes,
                           Bytes, std::vector<bool>, std::int64_t>;
using Answer = std::tuple<Indices, std::int64_t, std::int64_t>;

constexpr Index kBoundary = -1;
constexpr std::size_t kPlacesBehindOps = 2;
constexpr double kValueTolerance = 1e-9;

std::size_t at(Index index) { return static_cast<std::size_t>(index); }

// One copy of a storage: where it is written, and the positions that read it.
struct Copy {
  Index storage;
  Index birth;
  Indices uses;

  Index end() const { return uses.empty() ? birth : uses.back(); }
};

// What takes one change back.
struct Undo {
  enum class Kind { kBytes, kRun, kUse, kMerge } kind;
  Index first;
  Index second;
  std::int64_t amount;
};

void check_storages(const std::vector<Indices>& lists, std::size_t count) {
  for (const auto& list : lists) check_indices(list, count, "there is no such storage");
}

class Table {
 public:
  Table(Numbers numbers, Indices order, std::optional<double> time_limit_s)
      : watch_(time_limit_s),
        op_reads_(std::move(std::get<0>(numbers))),
        op_writes_(std::move(std::get<1>(numbers))),
        size_(std::move(std::get<2>(numbers))),
        cost_(std::move(std::get<3>(numbers))),
        workspace_(std::move(std::get<4>(numbers))),
        stays_once_(std::move(std::get<5>(numbers))),
        ops_(std::move(order)),
        is_in_(ops_.size(), true),
        gone_in_(ops_.size() + 1, 0) {
    check(std::get<6>(numbers));
    collect();
    make_timeline(std::get<6>(numbers));
  }

  void drop_unread_runs() {
    for (std::size_t position = ops_.size(); position-- > 0;) {
      if (is_in_[position] && is_unread(position)) take_out(position);
    }
    undo_.clear();
  }

  // Until a pass changes nothing, or the time is up.
  void improve(std::int64_t budget_bytes, double length_exponent) {
    try {
      while (keep_instead_of_recompute(budget_bytes, length_exponent)) watch_.look();
    } catch (const TimeUp&) {
      // What was accepted by now is consistent: time is looked at between changes.
    }
  }

  Answer answer() const {
    Indices order;
    std::int64_t cost_ns = 0;
    for (std::size_t position = 0; position < ops_.size(); ++position) {
      if (!is_in_[position]) continue;
      const Index op = ops_[position];
      order.push_back(op);
      if (op != kBoundary) cost_ns += cost_[at(op)];
    }
    return {std::move(order), cost_ns, *std::ranges::max_element(used_bytes_)};
  }

 private:
  void check(std::int64_t resident_bytes) const {
    const std::size_t count = cost_.size();
    if (op_reads_.size() != count + kPlacesBehindOps ||
        op_writes_.size() != op_reads_.size() || workspace_.size() != count ||
        stays_once_.size() != count) {
      throw std::invalid_argument("the lists of ops differ in length");
    }
    check_storages(op_reads_, size_.size());
    check_storages(op_writes_, size_.size());
    check_indices(ops_, count, "the order holds an op that the graph does not have",
                  kBoundary);
    const Capped bytes = total(size_) + total(workspace_) + Capped(resident_bytes);
    require(bytes.value() <= kMostTotal, "sizes add up to more than 2**60");
    Capped time = total(cost_);
    for (const Index op : ops_) {
      if (op != kBoundary) time += Capped(cost_[at(op)]);
    }
    require(time.value() <= kMostTotal, "times add up to more than 2**60");
  }

  // The end and the boundary stand behind the ops.
  const Indices& reads_of(Index op) const {
    return op >= 0 ? op_reads_[at(op)] : op_reads_.back();
  }
  const Indices& writes_of(Index op) const {
    return op >= 0 ? op_writes_[at(op)] : op_writes_.back();
  }

  void collect() {
    runs_of_.resize(cost_.size());
    made_.reserve(ops_.size() + 1);
    read_.reserve(ops_.size());
    std::vector<std::size_t> latest(size_.size(), kNone);
    for (std::size_t position = 0; position < ops_.size(); ++position) {
      const Index op = ops_[position];
      if (op != kBoundary) runs_of_[at(op)].push_back(static_cast<Index>(position));
      read_.push_back(note_reads(latest, reads_of(op), position));
      made_.push_back(copies_.size());
      for (const Index s : writes_of(op)) {
        copies_.push_back({s, static_cast<Index>(position), {}});
      }
      for (std::size_t copy = made_.back(); copy < copies_.size(); ++copy) {
        latest[at(copies_[copy].storage)] = copy;
      }
    }
    made_.push_back(copies_.size());
    note_reads(latest, op_reads_[cost_.size()], ops_.size());
  }

  std::vector<std::size_t> note_reads(const std::vector<std::size_t>& latest,
                                      const Indices& storages, std::size_t position) {
    std::vector<std::size_t> found;
    found.reserve(storages.size());
    for (const Index s : storages) {
      const std::size_t copy = latest[at(s)];
      if (copy == kNone) throw nb::key_error("a storage is read before it is written");
      copies_[copy].uses.push_back(static_cast<Index>(position));
      found.push_back(copy);
    }
    return found;
  }

  void make_timeline(std::int64_t resident_bytes) {
    used_bytes_.assign(ops_.size() + 2, 0);
    for (const Copy& copy : copies_) {
      used_bytes_[at(copy.birth)] += size_[at(copy.storage)];
      used_bytes_[at(copy.end()) + 1] -= size_[at(copy.storage)];
    }
    used_bytes_.pop_back();
    std::int64_t live = resident_bytes;
    for (std::size_t position = 0; position < used_bytes_.size(); ++position) {
      live += used_bytes_[position];
      const bool is_run = position < ops_.size() && ops_[position] != kBoundary;
      used_bytes_[position] = live + (is_run ? workspace_[at(ops_[position])] : 0);
    }
  }

  bool keep_instead_of_recompute(std::int64_t budget_bytes, double length_exponent) {
    std::vector<std::pair<double, std::size_t>> queue;
    for (const auto& runs : runs_of_) {
      bool is_first = true;
      for (const Index position : runs) {
        if (!is_in_[at(position)]) continue;
        if (!is_first) {
          watch_.look();
          queue.emplace_back(-value(at(position), length_exponent), at(position));
        }
        is_first = false;
      }
    }
    const auto later = std::greater<>{};
    std::ranges::make_heap(queue, later);
    bool has_changed = false;
    while (!queue.empty()) {
      watch_.look();
      std::ranges::pop_heap(queue, later);
      const std::size_t position = queue.back().second;
      queue.pop_back();
      if (!is_in_[position]) continue;
      const double now = value(position, length_exponent);
      if (!queue.empty() && now < -queue.front().first * (1 - kValueTolerance)) {
        queue.emplace_back(-now, position);
        std::ranges::push_heap(queue, later);
      } else if (try_without(position, budget_bytes)) {
        has_changed = true;
      }
    }
    return has_changed;
  }

  std::size_t previous_run(std::size_t position) const {
    const Indices& runs = runs_of_[at(ops_[position])];
    auto it = std::ranges::lower_bound(runs, static_cast<Index>(position));
    while (it != runs.begin()) {
      --it;
      if (is_in_[at(*it)]) return at(*it);
    }
    return kNone;
  }

  double value(std::size_t position, double length_exponent) {
    const std::size_t previous = previous_run(position);
    if (previous == kNone) return 0.0;
    double kept = 0.0;
    for (std::size_t k = 0; k < made_[position + 1] - made_[position]; ++k) {
      const Copy& before = copies_[made_[previous] + k];
      const Copy& after = copies_[made_[position] + k];
      if (after.uses.empty()) continue;
      const auto length = static_cast<double>(static_cast<Index>(position) - before.end());
      kept += static_cast<double>(size_[at(after.storage)]) *
              std::pow(length, length_exponent);
    }
    return static_cast<double>(saved_ns(position)) / std::max(kept, 1.0);
  }

  // The time of a run and of the runs that only it needs.
  std::int64_t saved_ns(std::size_t position) {
    ++round_;
    gone_.assign(1, position);
    gone_in_[position] = round_;
    std::int64_t saved = 0;
    for (std::size_t next = 0; next < gone_.size(); ++next) {
      const std::size_t current = gone_[next];
      saved += cost_[at(ops_[current])];
      for (const std::size_t copy : read_[current]) {
        const std::size_t birth = at(copies_[copy].birth);
        if (!is_gone(birth) && is_needed_only_by_gone(birth)) {
          gone_.push_back(birth);
          gone_in_[birth] = round_;
        }
      }
    }
    return saved;
  }

  bool is_gone(std::size_t position) const {
    return gone_in_[position] == round_;
  }

  bool is_needed_only_by_gone(std::size_t position) const {
    const Index op = ops_[position];
    if (op == kBoundary) return false;
    if (stays_once_[at(op)] && previous_run(position) == kNone) return false;
    for (std::size_t copy = made_[position]; copy < made_[position + 1]; ++copy) {
      for (const Index use : copies_[copy].uses) {
        if (!is_gone(at(use))) return false;
      }
    }
    return true;
  }

  bool try_without(std::size_t position, std::int64_t budget_bytes) {
    const std::size_t previous = previous_run(position);
    if (previous == kNone) return false;
    undo_.clear();
    std::vector<std::pair<Index, Index>> grown;
    const auto here = static_cast<Index>(position);
    for (std::size_t k = 0; k < made_[position + 1] - made_[position]; ++k) {
      const std::size_t before = made_[previous] + k;
      const std::size_t after = made_[position] + k;
      if (copies_[after].uses.empty()) continue;
      const Index start = copies_[before].end() + 1;
      grown.emplace_back(start, here);
      // The position counts it already, but taking the run out uncounts it.
      add(start, here + 1, size_[at(copies_[after].storage)]);
      merge(before, after);
    }
    take_out(position);
    for (const auto& [start, stop] : grown) {
      if (start < stop &&
          *std::max_element(used_bytes_.begin() + start, used_bytes_.begin() + stop) >
              budget_bytes) {
        roll_back();
        return false;
      }
    }
    return true;
  }

  // Lets the copy `before` serve what reads the copy `after`.
  void merge(std::size_t before, std::size_t after) {
    auto& uses = copies_[after].uses;
    auto& target = copies_[before].uses;
    for (const Index use : uses) redirect(use, after, before);
    target.insert(target.end(), uses.begin(), uses.end());
    undo_.push_back({Undo::Kind::kMerge, static_cast<Index>(before),
                     static_cast<Index>(after), static_cast<std::int64_t>(uses.size())});
    uses.clear();
  }

  void split(std::size_t before, std::size_t after, std::int64_t count) {
    auto& source = copies_[before].uses;
    const auto start = source.end() - count;
    copies_[after].uses.assign(start, source.end());
    source.erase(start, source.end());
    for (const Index use : copies_[after].uses) redirect(use, before, after);
  }

  void redirect(Index use, std::size_t source, std::size_t target) {
    if (at(use) < ops_.size()) {
      std::ranges::replace(read_[at(use)], source, target);
    }
  }

  void add(Index start, Index stop, std::int64_t size_bytes) {
    if (start >= stop || size_bytes == 0) return;
    change(start, stop, size_bytes);
    undo_.push_back({Undo::Kind::kBytes, start, stop, size_bytes});
  }

  void change(Index start, Index stop, std::int64_t size_bytes) {
    for (auto it = used_bytes_.begin() + start; it != used_bytes_.begin() + stop; ++it) {
      *it += size_bytes;
    }
  }

  // Whether no output of the run is read, and it is not there for an effect.
  bool is_unread(std::size_t position) const {
    const Index op = ops_[position];
    if (op == kBoundary) return false;
    for (std::size_t copy = made_[position]; copy < made_[position + 1]; ++copy) {
      if (!copies_[copy].uses.empty()) return false;
    }
    return !stays_once_[at(op)] || previous_run(position) != kNone;
  }

  // Takes out an unread run, and the runs that nobody reads once it is gone.
  void take_out(std::size_t first) {
    pending_.assign(1, first);
    while (!pending_.empty()) {
      const std::size_t current = pending_.back();
      pending_.pop_back();
      if (!is_in_[current]) continue;
      const auto here = static_cast<Index>(current);
      is_in_[current] = false;
      undo_.push_back({Undo::Kind::kRun, here, 0, 0});
      std::int64_t size = workspace_[at(ops_[current])];
      for (std::size_t copy = made_[current]; copy < made_[current + 1]; ++copy) {
        size += size_[at(copies_[copy].storage)];
      }
      add(here, here + 1, -size);
      for (const std::size_t index : read_[current]) {
        Copy& copy = copies_[index];
        const Index end = copy.end();
        copy.uses.erase(std::ranges::lower_bound(copy.uses, here));
        undo_.push_back({Undo::Kind::kUse, static_cast<Index>(index), here, 0});
        add(copy.end() + 1, end + 1, -size_[at(copy.storage)]);
        const std::size_t birth = at(copy.birth);
        if (is_in_[birth] && is_unread(birth)) pending_.push_back(birth);
      }
    }
  }

  void roll_back() {
    for (; !undo_.empty(); undo_.pop_back()) {
      const auto& [kind, first, second, amount] = undo_.back();
      switch (kind) {
        case Undo::Kind::kBytes:
          change(first, second, -amount);
          break;
        case Undo::Kind::kRun:
          is_in_[at(first)] = true;
          break;
        case Undo::Kind::kUse: {
          auto& uses = copies_[at(first)].uses;
          uses.insert(std::ranges::upper_bound(uses, second), second);
          break;
        }
        case Undo::Kind::kMerge:
          split(at(first), at(second), amount);
          break;
      }
    }
  }

  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  Watch watch_;
  std::vector<Indices> op_reads_;
  std::vector<Indices> op_writes_;
  Bytes size_;
  Bytes cost_;
  Bytes workspace_;
  std::vector<bool> stays_once_;
  Indices ops_;
  std::vector<bool> is_in_;
  std::vector<Indices> runs_of_;
  std::vector<Copy> copies_;
  // The copies made at a position: from made_[position] up to made_[position + 1].
  std::vector<std::size_t> made_;
  std::vector<std::vector<std::size_t>> read_;
  Bytes used_bytes_;
  std::vector<Undo> undo_;
  std::vector<std::size_t> gone_;
  // The round in which a position, or the end, was last among those gone.
  std::vector<std::uint64_t> gone_in_;
  std::uint64_t round_ = 0;
  std::vector<std::size_t> pending_;
};

std::tuple<std::int64_t, std::int64_t> weigh_order(Numbers numbers, Indices order) {
  const Table table(std::move(numbers), std::move(order), std::nullopt);
  const auto& [same, cost_ns, peak_bytes] = table.answer();
  return {cost_ns, peak_bytes};
}

Answer without_unread_runs(Numbers numbers, Indices order) {
  Table table(std::move(numbers), std::move(order), std::nullopt);
  table.drop_unread_runs();
  return table.answer();
}

Answer improve_retention(Numbers numbers, Indices order, std::int64_t budget_bytes,
                         double length_exponent, std::optional<double> time_limit_s) {
  check_exponent(length_exponent);
  Table table(std::move(numbers), std::move(order), time_limit_s);
  table.drop_unread_runs();
  table.improve(budget_bytes, length_exponent);
  return table.answer();
}

}  // namespace

void bind_retention(nb::module_& module) {
  module.def("weigh_order", &weigh_order, nb::arg("numbers"), nb::arg("order"));
  module.def("without_unread_runs", &without_unread_runs, nb::arg("numbers"),
             nb::arg("order"));
  module.def("improve_retention", &improve_retention, nb::arg("numbers"),
             nb::arg("order"), nb::arg("budget_bytes"), nb::arg("length_exponent"),
             nb::arg("time_limit_s").none());
}

}  // namespace remat
