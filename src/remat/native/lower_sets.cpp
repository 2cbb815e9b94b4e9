// Lower sets of a forward graph: enumeration, and the programs, for Python.

#include "lower_sets.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "checks.hpp"
#include "lower_set_families.hpp"
#include "lower_set_programs.hpp"
#include "lower_set_tables.hpp"
#include "watch.hpp"

namespace nb = nanobind;

namespace remat {
namespace {

using lower_sets::Answer;
using lower_sets::Edges;
using lower_sets::Found;
using lower_sets::Goal;
using lower_sets::GraphArrays;
using lower_sets::Index;
using lower_sets::Known;
using lower_sets::Query;
using lower_sets::Tables;
using lower_sets::Word;

using Rows = nb::ndarray<const Word, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using NewRows = nb::ndarray<nb::numpy, Word, nb::ndim<2>>;
using PlainAnswer = std::tuple<int, std::int64_t, std::int64_t, std::vector<Index>>;
using PlainQuery = std::tuple<std::int64_t, std::int64_t, bool>;
using PlainKnown = std::vector<std::vector<std::int64_t>>;

// Enumerations take n * n bits of n values, and less than this for the sets themselves.
constexpr std::int64_t kMostNodes = std::int64_t{1} << 15;
constexpr std::int64_t kMostSetBytes = std::int64_t{1} << 29;

NewRows hand_over(std::vector<Word>&& words, std::size_t width) {
  auto* const kept = new std::vector<Word>(std::move(words));
  const nb::capsule owner(kept, [](void* p) noexcept {
    delete static_cast<std::vector<Word>*>(p);
  });
  return NewRows(kept->data(), {kept->size() / width, width}, owner);
}

// As remat.algorithms.lower_sets.families.check_count.
std::size_t checked_count(std::int64_t nodes) {
  require(nodes >= 1 && nodes <= kMostNodes, "a graph has 1 to 2**15 values");
  return static_cast<std::size_t>(nodes);
}

std::optional<NewRows> enumerate_lower_sets(std::int64_t node_count, const Edges& edges,
                                            std::int64_t most) {
  const std::size_t nodes = checked_count(node_count);
  const auto width = static_cast<std::int64_t>((nodes + 63) / 64);
  require(most >= 1 && most <= kMostSetBytes / (8 * width),
          "the cap must be at least 1, and the sets take at most 2**29 bytes");
  const auto cap = static_cast<std::size_t>(most);
  std::optional<std::vector<Word>> found;
  {
    const nb::gil_scoped_release release;
    Watch watch(std::nullopt);
    found = lower_sets::enumerate(nodes, edges, cap, watch);
  }
  if (!found) return std::nullopt;
  return hand_over(std::move(*found), (nodes + 63) / 64);
}

NewRows neighbouring_lower_sets(const Edges& edges, const Rows& rows,
                                std::int64_t node_count) {
  const std::size_t nodes = checked_count(node_count);
  const std::size_t width = (nodes + 63) / 64;
  require(rows.shape(1) == width, "rows must be bit sets of the values");
  for (std::size_t i = 0; i < rows.shape(0); ++i) {
    const Word last = rows.data()[(i + 1) * width - 1];
    require(nodes % 64 == 0 || last >> (nodes % 64) == 0,
            "rows must be bit sets of the values");
  }
  std::vector<Word> found;
  {
    const nb::gil_scoped_release release;
    Watch watch(std::nullopt);
    found = lower_sets::neighbours(nodes, edges, {rows.data(), rows.size()}, watch);
  }
  return hand_over(std::move(found), width);
}

NewRows narrowest_lower_sets(const std::vector<std::int64_t>& bytes, const Edges& edges,
                             const Edges& order_edges) {
  checked_count(static_cast<std::int64_t>(bytes.size()));
  std::vector<Word> found;
  {
    const nb::gil_scoped_release release;
    Watch watch(std::nullopt);
    found = lower_sets::narrowest(bytes, edges, order_edges, watch);
  }
  return hand_over(std::move(found), (bytes.size() + 63) / 64);
}

Tables make_tables(const GraphArrays& graph, const Rows& rows) {
  const std::span<const Word> words(rows.data(), rows.size());
  return Tables(graph, words, rows.shape(1));
}

// Whether they increase is looked at where they are used.
Known known_rows(const PlainKnown& given, const Tables& tables) {
  Known known;
  for (const auto& rows : given) {
    check_indices(rows, tables.size(), "a known sequence does not increase");
    known.emplace_back(rows.begin(), rows.end());
    lower_sets::check_sequence(tables, known.back());
  }
  return known;
}

std::vector<PlainAnswer> solve_lower_sets(const GraphArrays& graph, const Rows& rows,
                                          const std::vector<PlainQuery>& queries,
                                          const PlainKnown& given,
                                          std::optional<double> time_limit_s) {
  const nb::gil_scoped_release release;
  Watch watch(time_limit_s);
  const Tables tables = make_tables(graph, rows);
  const Known known = known_rows(given, tables);
  for (const auto& [budget, goal, charge_last] : queries) {
    lower_sets::check_query(budget, goal);
  }
  // Smaller budgets first: what fits them bounds the search of larger ones.
  std::vector<std::size_t> order(queries.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::get<0>(queries[a]) < std::get<0>(queries[b]);
  });
  std::vector<PlainAnswer> answers(queries.size());
  Known earlier;
  for (const std::size_t i : order) {
    const auto& [budget, goal, charge_last] = queries[i];
    const Query query{budget, static_cast<Goal>(goal), charge_last};
    Answer answer = lower_sets::solve(tables, query, known, earlier, watch);
    const std::int64_t overhead = query.goal == Goal::kMostOverhead
                                      ? -answer.sequence.overhead
                                      : answer.sequence.overhead;
    if (!answer.sequence.rows.empty()) earlier.push_back(answer.sequence.rows);
    answers[i] = {static_cast<int>(answer.found), overhead, answer.sequence.cached,
                  std::move(answer.sequence.rows)};
  }
  return answers;
}

PlainAnswer smallest_lower_set_budget(const GraphArrays& graph, const Rows& rows,
                                      const PlainKnown& given,
                                      std::optional<double> time_limit_s) {
  const nb::gil_scoped_release release;
  Watch watch(time_limit_s);
  const Tables tables = make_tables(graph, rows);
  const Known known = known_rows(given, tables);
  Answer answer = lower_sets::smallest_budget(tables, known, watch);
  return {static_cast<int>(answer.found), answer.sequence.peak, answer.sequence.cached,
          std::move(answer.sequence.rows)};
}

}  // namespace

void bind_lower_sets(nb::module_& module) {
  module.def("enumerate_lower_sets", &enumerate_lower_sets, nb::arg("node_count"),
             nb::arg("edges"), nb::arg("cap"));
  module.def("narrowest_lower_sets", &narrowest_lower_sets, nb::arg("memory_bytes"),
             nb::arg("edges"), nb::arg("order_edges"));
  module.def("neighbouring_lower_sets", &neighbouring_lower_sets, nb::arg("edges"),
             nb::arg("rows"), nb::arg("node_count"));
  module.def("solve_lower_sets", &solve_lower_sets, nb::arg("graph"), nb::arg("rows"),
             nb::arg("queries"), nb::arg("known"), nb::arg("time_limit_s").none());
  module.def("smallest_lower_set_budget", &smallest_lower_set_budget, nb::arg("graph"),
             nb::arg("rows"), nb::arg("known"), nb::arg("time_limit_s").none());
}

}  // namespace remat
