// Chains on several storage levels: native twins of remat.algorithms.chains.level_tables, which
// documents the recurrences, the actions, and the order in which ties are broken.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstddef>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "chains.hpp"
#include "checks.hpp"

namespace nb = nanobind;

namespace remat::chains {
namespace {

using Index = std::ptrdiff_t;
using Action = std::tuple<Index, Index, Index>;
using Answer = std::tuple<Cost, std::vector<Action>>;

enum Kind : Index { advance = 0, backward = 1, store = 2, load = 3, reverse = 4 };

// H-Revolve: for each level, rows of chain lengths for each number of slots.
class Levels {
 public:
  Levels(Index length, std::vector<Index> slots, std::vector<Cost> write,
         std::vector<Cost> read, Cost forward_cost, Cost backward_cost)
      : length_(length),
        slots_(std::move(slots)),
        write_(std::move(write)),
        read_(std::move(read)),
        forward_(forward_cost),
        backward_(backward_cost) {
    for (auto& count : slots_) {
      count = std::min(count, length_);
    }
    for (std::size_t k = 0; k < slots_.size(); ++k) {
      fill(k);
    }
  }

  std::optional<Answer> answer() {
    const std::size_t top = slots_.size() - 1;
    const Cost cost = row(unstored_, top, slots_[top])[length_];
    if (cost >= infinite) {
      return std::nullopt;
    }
    run(top);
    return Answer{cost, std::move(actions_)};
  }

 private:
  using Tables = std::vector<std::vector<Cost>>;

  [[nodiscard]] Cost* row(Tables& tables, std::size_t level, Index free) {
    return tables[level].data() + free * (length_ + 1);
  }

  [[nodiscard]] Cost lower(std::size_t level, Index length) {
    return level == 0 ? infinite
                      : row(unstored_, level - 1, slots_[level - 1])[length];
  }

  void fill(std::size_t level) {
    const auto size = static_cast<std::size_t>((slots_[level] + 1) * (length_ + 1));
    unstored_.emplace_back(size, infinite);
    stored_.emplace_back(size, infinite);
    for (Index free = 0; free <= slots_[level]; ++free) {
      check_signals();
      Cost* own = row(unstored_, level, free);
      Cost* kept = row(stored_, level, free);
      own[0] = backward_;
      kept[0] = backward_;
      for (Index l = 1; l <= length_; ++l) {
        if (l % 256 == 0) {
          check_signals();
        }
        const Cost below = lower(level, l);
        if (free == 0) {
          own[l] = below;
          continue;
        }
        const Cost* upper = row(unstored_, level, free - 1);
        Cost best = below;
        for (Index j = 1; j <= l; ++j) {
          const Cost sweep = j * forward_ + read_[level];
          best = std::min(best, sweep + upper[l - j] + kept[j - 1]);
        }
        kept[l] = best;
        own[l] = std::min(below, capped(write_[level] + best));
      }
    }
  }

  struct Task {
    bool is_stored;
    std::size_t level;
    Index base;
    Index length;
    Index free;
    bool loads;
  };

  void run(std::size_t top) {
    std::vector<Task> pending{{false, top, 0, length_, slots_[top], false}};
    while (!pending.empty()) {
      Task task = pending.back();
      pending.pop_back();
      if (task.loads) {
        actions_.emplace_back(load, task.base, static_cast<Index>(task.level));
      }
      if (task.length == 0) {
        actions_.emplace_back(backward, task.base, 0);
        continue;
      }
      const std::size_t k = task.level;
      const Cost below = lower(k, task.length);
      const Cost here =
          row(task.is_stored ? stored_ : unstored_, k, task.free)[task.length];
      if (here == below) {
        pending.push_back({false, k - 1, task.base, task.length, slots_[k - 1], false});
        continue;
      }
      if (!task.is_stored) {
        actions_.emplace_back(store, task.base, static_cast<Index>(k));
        task.is_stored = true;
        task.loads = false;
        pending.push_back(task);
        continue;
      }
      const Index j = best_advance(k, task.length, task.free);
      actions_.emplace_back(advance, task.base, task.base + j);
      pending.push_back({true, k, task.base, j - 1, task.free, true});
      pending.push_back({false, k, task.base + j, task.length - j, task.free - 1, false});
    }
  }

  [[nodiscard]] Index best_advance(std::size_t level, Index length, Index free) {
    const Cost* upper = row(unstored_, level, free - 1);
    const Cost* kept = row(stored_, level, free);
    Cost best = infinite;
    Index at = 1;
    for (Index j = 1; j <= length; ++j) {
      const Cost cost = j * forward_ + read_[level] + upper[length - j] + kept[j - 1];
      if (cost < best) {
        best = cost;
        at = j;
      }
    }
    return at;
  }

  Index length_;
  std::vector<Index> slots_;
  std::vector<Cost> write_;
  std::vector<Cost> read_;
  Cost forward_;
  Cost backward_;
  Tables unstored_;
  Tables stored_;
  std::vector<Action> actions_;
};

// As remat.algorithms.chains.level_tables.check_worst.
void check_worst(Index length, Cost forward_cost, Cost backward_cost, Capped copies) {
  const Capped stages = Capped(length) + Capped(1);
  const Capped worst =
      stages * (stages * Capped(forward_cost) + Capped(backward_cost) + copies);
  require(worst.value() < infinite, "costs add up to 2**61 or more at worst");
}

std::optional<Answer> hrevolve_plan(Index length, std::vector<Index> slots,
                                    std::vector<Cost> write, std::vector<Cost> read,
                                    Cost forward_cost, Cost backward_cost) {
  require(!slots.empty() && write.size() == slots.size() && read.size() == slots.size(),
          "there must be at least one level, with slots and both costs");
  check_worst(length, forward_cost, backward_cost, total(write) + total(read));
  Capped rows = Capped::count(slots.size());
  for (const Index count : slots) rows += Capped(std::min(count, length));
  check_table(Capped(2) * rows * (Capped(length) + Capped(1)));
  return Levels(length, std::move(slots), std::move(write), std::move(read),
                forward_cost, backward_cost)
      .answer();
}

Answer disk_revolve_plan(const std::vector<Cost>& in_memory, Cost write, Cost read,
                         Cost forward_cost, Cost backward_cost) {
  require(!in_memory.empty(), "the costs in memory must begin with that of no stage");
  for (const Cost cost : in_memory) {
    require(cost >= 0 && cost <= infinite, "a cost must be 0 to 2**61");
  }
  check_worst(static_cast<Index>(in_memory.size()) - 1, forward_cost, backward_cost,
              Capped(write) + Capped(read));
  const auto size = in_memory.size();
  std::vector<Cost> again{backward_cost};
  std::vector<Cost> fresh{backward_cost};
  std::vector<std::size_t> again_from{0};
  std::vector<std::size_t> fresh_from{0};
  for (std::size_t l = 1; l < size; ++l) {
    if (l % 256 == 0) {
      check_signals();
    }
    std::array<Cost, 2> best{in_memory[l], in_memory[l]};
    std::array<std::size_t, 2> from{0, 0};
    for (std::size_t j = 1; j <= l; ++j) {
      const Cost shared = static_cast<Cost>(j) * forward_cost + read + again[j - 1];
      const Cost once = shared + in_memory[l - j];
      if (once < best[0]) {
        best[0] = once;
        from[0] = j;
      }
      const Cost split = shared + write + fresh[l - j];
      if (split < best[1]) {
        best[1] = split;
        from[1] = j;
      }
    }
    again.push_back(capped(best[0]));
    again_from.push_back(from[0]);
    fresh.push_back(capped(best[1]));
    fresh_from.push_back(from[1]);
  }
  std::vector<Action> actions;
  std::vector<std::tuple<std::size_t, std::size_t, bool>> pending{{0, size - 1, false}};
  while (!pending.empty()) {
    const auto [base, l, is_stored] = pending.back();
    pending.pop_back();
    const auto first = static_cast<Index>(base);
    const auto end = static_cast<Index>(base + l);
    if (is_stored) {
      actions.emplace_back(load, first, 1);
    }
    const std::size_t j = is_stored ? again_from[l] : fresh_from[l];
    if (j == 0) {
      actions.emplace_back(reverse, first, end);
      continue;
    }
    const auto middle = static_cast<Index>(base + j);
    if (!is_stored) {
      actions.emplace_back(store, first, 1);
    }
    actions.emplace_back(advance, first, middle);
    pending.emplace_back(base, j - 1, true);
    if (is_stored) {
      actions.emplace_back(reverse, middle, end);
    } else {
      pending.emplace_back(base + j, l - j, false);
    }
  }
  return {fresh.back(), std::move(actions)};
}

}  // namespace

void bind_levels(nb::module_& module) {
  module.def("hrevolve_plan", &hrevolve_plan, nb::arg("length"), nb::arg("slots"),
             nb::arg("write"), nb::arg("read"), nb::arg("forward"),
             nb::arg("backward"));
  module.def("disk_revolve_plan", &disk_revolve_plan, nb::arg("in_memory"),
             nb::arg("write"), nb::arg("read"), nb::arg("forward"),
             nb::arg("backward"));
}

}  // namespace remat::chains
