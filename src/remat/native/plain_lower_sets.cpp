// The recurrence over lower sets as Kusumoto et al. (NeurIPS 2019) state it: every pair
// of sets, every state, nothing left out and nothing known beforehand. Studies measure
// the core's programs against it; nothing else runs it. Its answers are those of
// solve_lower_sets.

#include "plain_lower_sets.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "checks.hpp"
#include "lower_set_programs.hpp"
#include "lower_set_tables.hpp"
#include "watch.hpp"

namespace nb = nanobind;

namespace remat {
namespace {

using lower_sets::GraphArrays;
using lower_sets::Index;
using lower_sets::Word;

using Rows = nb::ndarray<const Word, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using PlainAnswer = std::tuple<int, std::int64_t, std::int64_t, std::vector<Index>>;

constexpr std::int64_t kInfinity = std::numeric_limits<std::int64_t>::max() / 2;
constexpr std::int64_t kLongestRow = 100'000;
constexpr std::size_t kMostEntries = std::size_t{200} << 20;

class PlainProgram {
 public:
  PlainProgram(const GraphArrays& graph, const Rows& rows)
      : memory_(std::get<0>(graph)), words_(rows.shape(1)), count_(rows.shape(0)) {
    // Checks the arguments; nothing else of it is used.
    const lower_sets::Tables checked(graph, {rows.data(), rows.size()}, words_);
    const auto& [memory, cost, segment, edges, owed] = graph;
    cost_ = cost;
    sets_.assign(rows.data(), rows.data() + rows.size());
    for (std::size_t i = 0; i < count_; ++i) {
      std::vector<Word> boundary(words_), consumers(words_), beside(words_);
      for (const auto& [a, b] : edges) {
        const auto u = static_cast<std::size_t>(a), v = static_cast<std::size_t>(b);
        if (!has(set(i), u) || has(set(i), v)) continue;
        add(boundary, u);
        add(consumers, v);
      }
      for (const auto& [a, b] : edges) {
        const auto u = static_cast<std::size_t>(a), v = static_cast<std::size_t>(b);
        if (has(consumers, v) && !has(set(i), u)) add(beside, u);
      }
      segment_sum_.push_back(total(set(i), segment));
      cost_sum_.push_back(total(set(i), cost));
      const std::int64_t held[] = {total(consumers, memory) + total(beside, memory),
                                   total(boundary, memory), 0};
      owed_.push_back(held[owed]);
      boundary_.push_back(std::move(boundary));
    }
  }

  PlainAnswer solve(std::int64_t budget, int goal, bool charge_last, Watch& watch) const {
    const std::int64_t most_cost = cost_sum_.back();
    if (most_cost >= kLongestRow ||
        count_ * static_cast<std::size_t>(most_cost + 1) > kMostEntries) {
      throw std::invalid_argument("the costs add up to too much for the plain program");
    }
    const auto width = static_cast<std::size_t>(most_cost + 1);
    std::vector<std::int64_t> least(count_ * width, kInfinity);
    std::vector<Index> from(count_ * width);
    least[0] = 0;
    std::vector<Word> kept(words_);
    for (std::size_t a = 0; a + 1 < count_; ++a) {
      watch.spend(static_cast<std::int64_t>(count_));
      for (std::size_t b = a + 1; b < count_; ++b) {
        if (!is_subset(a, b)) continue;
        for (std::size_t k = 0; k < words_; ++k) kept[k] = boundary_[b][k] & ~set(a)[k];
        const std::int64_t charge = segment_sum_[b] - segment_sum_[a] + owed_[b];
        const bool is_free = b == count_ - 1 && !charge_last;
        const std::int64_t more =
            is_free ? 0 : cost_sum_[b] - cost_sum_[a] - total(kept, cost_);
        const std::int64_t bytes = total(kept, memory_);
        watch.spend(most_cost - more);
        for (std::int64_t t = 0; t + more <= most_cost; ++t) {
          const std::int64_t m = least[a * width + static_cast<std::size_t>(t)];
          if (m == kInfinity || m + charge > budget) continue;
          const std::size_t at = b * width + static_cast<std::size_t>(t + more);
          if (m + bytes < least[at]) {
            least[at] = m + bytes;
            from[at] = static_cast<Index>(a);
          }
        }
      }
    }
    return best(least, from, width, goal, charge_last);
  }

 private:
  [[nodiscard]] std::span<const Word> set(std::size_t i) const {
    return {sets_.data() + i * words_, words_};
  }
  static bool has(std::span<const Word> set, std::size_t v) {
    return ((set[v / 64] >> (v % 64)) & 1U) != 0;
  }
  static void add(std::vector<Word>& set, std::size_t v) {
    set[v / 64] |= Word{1} << (v % 64);
  }
  static std::int64_t total(std::span<const Word> set, const std::vector<std::int64_t>& of) {
    std::int64_t sum = 0;
    for (std::size_t k = 0; k < set.size(); ++k) {
      for (Word word = set[k]; word != 0; word &= word - 1) {
        sum += of[k * 64 + static_cast<std::size_t>(std::countr_zero(word))];
      }
    }
    return sum;
  }
  [[nodiscard]] bool is_subset(std::size_t a, std::size_t b) const {
    for (std::size_t k = 0; k < words_; ++k) {
      if ((set(a)[k] & ~set(b)[k]) != 0) return false;
    }
    return true;
  }

  [[nodiscard]] PlainAnswer best(const std::vector<std::int64_t>& least,
                                 const std::vector<Index>& from, std::size_t width, int goal,
                                 bool charge_last) const {
    const std::int64_t* const last = least.data() + (count_ - 1) * width;
    std::optional<std::size_t> chosen;
    for (std::size_t t = 0; t < width; ++t) {
      if (last[t] == kInfinity) continue;
      const bool is_better = !chosen || goal == 1 || (goal == 2 && last[t] < last[*chosen]);
      if (is_better) chosen = t;
    }
    if (!chosen) return {0, 0, 0, {}};
    std::vector<Index> chain;
    std::size_t row = count_ - 1, t = *chosen;
    while (row != 0) {
      chain.push_back(static_cast<Index>(row));
      const std::size_t before = from[row * width + t];
      std::vector<Word> kept(words_);
      for (std::size_t k = 0; k < words_; ++k) kept[k] = boundary_[row][k] & ~set(before)[k];
      if (row != count_ - 1 || charge_last) {
        t -= static_cast<std::size_t>(cost_sum_[row] - cost_sum_[before] - total(kept, cost_));
      }
      row = before;
    }
    std::reverse(chain.begin(), chain.end());
    return {1, static_cast<std::int64_t>(*chosen), last[*chosen], std::move(chain)};
  }

  std::vector<std::int64_t> memory_, cost_;
  std::size_t words_, count_;
  std::vector<Word> sets_;
  std::vector<std::int64_t> segment_sum_, cost_sum_, owed_;
  std::vector<std::vector<Word>> boundary_;
};

std::vector<PlainAnswer> plain_solve_lower_sets(
    const GraphArrays& graph, const Rows& rows,
    const std::vector<std::tuple<std::int64_t, std::int64_t, bool>>& queries,
    const std::vector<std::vector<std::int64_t>>& /*known*/,
    std::optional<double> time_limit_s) {
  const nb::gil_scoped_release release;
  Watch watch(time_limit_s);
  const PlainProgram program(graph, rows);
  std::vector<PlainAnswer> answers;
  for (const auto& [budget, goal, charge_last] : queries) {
    lower_sets::check_query(budget, goal);
    try {
      answers.push_back(program.solve(budget, static_cast<int>(goal), charge_last, watch));
    } catch (const TimeUp&) {
      answers.emplace_back(3, 0, 0, std::vector<Index>{});
    }
  }
  return answers;
}

}  // namespace

void bind_plain_lower_sets(nb::module_& module) {
  module.def("plain_solve_lower_sets", &plain_solve_lower_sets, nb::arg("graph"),
             nb::arg("rows"), nb::arg("queries"), nb::arg("known"),
             nb::arg("time_limit_s").none());
}

}  // namespace remat
