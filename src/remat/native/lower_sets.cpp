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

#include "lower_set_programs.hpp"
#include "lower_set_tables.hpp"
#include "watch.hpp"

namespace nb = nanobind;

namespace remat {
namespace {

using lower_sets::Answer;
using lower_sets::Found;
using lower_sets::Goal;
using lower_sets::GraphArrays;
using lower_sets::Index;
using lower_sets::Query;
using lower_sets::Tables;
using lower_sets::Word;

using Rows = nb::ndarray<const Word, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using NewRows = nb::ndarray<nb::numpy, Word, nb::ndim<2>>;
using PlainAnswer = std::tuple<int, std::int64_t, std::int64_t, std::vector<Index>>;
using PlainQuery = std::tuple<std::int64_t, int, bool>;

NewRows hand_over(std::vector<Word>&& words, std::size_t width) {
  auto* const kept = new std::vector<Word>(std::move(words));
  const nb::capsule owner(kept, [](void* p) noexcept {
    delete static_cast<std::vector<Word>*>(p);
  });
  return NewRows(kept->data(), {kept->size() / width, width}, owner);
}

// Sets of one size, sorted and distinct; the values of word 0 count least.
class Layer {
 public:
  explicit Layer(std::size_t width) : width_(width) {}

  void add(const Word* set, std::size_t v) {
    words_.insert(words_.end(), set, set + width_);
    words_[words_.size() - width_ + v / 64] |= Word{1} << (v % 64);
  }
  [[nodiscard]] std::size_t size() const { return words_.size() / width_; }
  [[nodiscard]] const Word* set(std::size_t i) const { return &words_[i * width_]; }
  [[nodiscard]] const std::vector<Word>& words() const { return words_; }

  void sort() {
    std::vector<std::size_t> order(size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return std::lexicographical_compare(
          std::make_reverse_iterator(set(a) + width_), std::make_reverse_iterator(set(a)),
          std::make_reverse_iterator(set(b) + width_), std::make_reverse_iterator(set(b)));
    });
    std::vector<Word> sorted;
    sorted.reserve(words_.size());
    for (const std::size_t i : order) {
      const bool is_new =
          sorted.empty() || !std::equal(set(i), set(i) + width_, sorted.end() - static_cast<std::ptrdiff_t>(width_));
      if (is_new) sorted.insert(sorted.end(), set(i), set(i) + width_);
    }
    words_ = std::move(sorted);
  }

 private:
  std::size_t width_;
  std::vector<Word> words_;
};

std::optional<NewRows> enumerate_lower_sets(
    std::size_t nodes, const std::vector<std::pair<std::int64_t, std::int64_t>>& edges,
    std::size_t cap) {
  if (nodes == 0) throw std::invalid_argument("a graph has at least one value");
  const std::size_t width = (nodes + 63) / 64;
  std::vector<Word> needs(nodes * width);
  for (const auto& [u, v] : edges) {
    const auto count = static_cast<std::int64_t>(nodes);
    if (u < 0 || v < 0 || u >= count || v >= count) {
      throw std::invalid_argument("an edge names a value that does not exist");
    }
    needs[static_cast<std::size_t>(v) * width + static_cast<std::size_t>(u) / 64] |=
        Word{1} << (static_cast<std::size_t>(u) % 64);
  }
  std::optional<std::vector<Word>> found;
  {
    nb::gil_scoped_release release;
    Watch watch(std::nullopt);
    found.emplace(width);
    Layer layer(width);
    const std::vector<Word> none(width);
    std::size_t count = 1;
    std::vector<Word> frontier(width);
    std::size_t layer_size = 1;
    const Word* sets = none.data();
    while (layer_size > 0 && count <= cap) {
      Layer larger(width);
      for (std::size_t i = 0; i < layer_size; ++i) {
        const Word* const set = sets + i * width;
        watch.spend(static_cast<std::int64_t>(nodes));
        for (std::size_t v = 0; v < nodes; ++v) {
          if ((set[v / 64] >> (v % 64)) & 1U) continue;
          bool is_ready = true;
          for (std::size_t k = 0; k < width && is_ready; ++k) {
            is_ready = (needs[v * width + k] & ~set[k]) == 0;
          }
          if (is_ready) larger.add(set, v);
        }
        // Duplicates go now and then, so that a cap also bounds the memory.
        if (larger.size() > 4 * cap + 1024) {
          larger.sort();
          if (larger.size() > cap) break;
        }
      }
      larger.sort();
      count += larger.size();
      if (count > cap) break;
      found->insert(found->end(), larger.words().begin(), larger.words().end());
      layer = std::move(larger);
      layer_size = layer.size();
      sets = layer_size > 0 ? layer.set(0) : nullptr;
    }
    if (count > cap) found.reset();
  }
  if (!found) return std::nullopt;
  return hand_over(std::move(*found), width);
}

Tables make_tables(const GraphArrays& graph, const Rows& rows) {
  const std::span<const Word> words(rows.data(), rows.size());
  return Tables(graph, words, rows.shape(1));
}

std::vector<PlainAnswer> solve_lower_sets(const GraphArrays& graph, const Rows& rows,
                                          const std::vector<PlainQuery>& queries,
                                          std::optional<double> time_limit_s) {
  const nb::gil_scoped_release release;
  Watch watch(time_limit_s);
  const Tables tables = make_tables(graph, rows);
  // Smaller budgets first: what fits them bounds the search of larger ones.
  std::vector<std::size_t> order(queries.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::get<0>(queries[a]) < std::get<0>(queries[b]);
  });
  std::vector<PlainAnswer> answers(queries.size());
  std::vector<std::vector<Index>> known;
  for (const std::size_t i : order) {
    const auto& [budget, goal, charge_last] = queries[i];
    if (goal < 0 || goal > 2) throw std::invalid_argument("a goal must be 0, 1 or 2");
    const Query query{budget, static_cast<Goal>(goal), charge_last};
    Answer answer = lower_sets::solve(tables, query, known, watch);
    const std::int64_t overhead = query.goal == Goal::kMostOverhead
                                      ? -answer.sequence.overhead
                                      : answer.sequence.overhead;
    if (!answer.sequence.rows.empty()) known.push_back(answer.sequence.rows);
    answers[i] = {static_cast<int>(answer.found), overhead, answer.sequence.cached,
                  std::move(answer.sequence.rows)};
  }
  return answers;
}

PlainAnswer smallest_lower_set_budget(const GraphArrays& graph, const Rows& rows,
                                      std::optional<double> time_limit_s) {
  const nb::gil_scoped_release release;
  Watch watch(time_limit_s);
  const Tables tables = make_tables(graph, rows);
  Answer answer = lower_sets::smallest_budget(tables, watch);
  return {static_cast<int>(answer.found), answer.sequence.peak, answer.sequence.cached,
          std::move(answer.sequence.rows)};
}

}  // namespace

void bind_lower_sets(nb::module_& module) {
  module.def("enumerate_lower_sets", &enumerate_lower_sets, nb::arg("node_count"),
             nb::arg("edges"), nb::arg("cap"));
  module.def("solve_lower_sets", &solve_lower_sets, nb::arg("graph"), nb::arg("rows"),
             nb::arg("queries"), nb::arg("time_limit_s").none());
  module.def("smallest_lower_set_budget", &smallest_lower_set_budget, nb::arg("graph"),
             nb::arg("rows"), nb::arg("time_limit_s").none());
}

}  // namespace remat
