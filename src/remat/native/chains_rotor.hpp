// The Rotor program on one chain: what remat.algorithms.chains.rotor_tables documents, for the
// native twins of that module and of remat.algorithms.chains.stage_join_tables.
#pragma once

#include <cstddef>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "chains.hpp"
#include "checks.hpp"

namespace remat::chains::rotor {

using Index = std::ptrdiff_t;
using Bytes = std::int64_t;
using Option = std::tuple<Cost, Cost, Bytes, bool, Bytes, Bytes>;
using Run = std::tuple<Index, Index, Index>;
using Answer = std::tuple<Cost, std::vector<Run>>;
using Chain = std::tuple<std::vector<Bytes>, std::vector<Bytes>, std::vector<Cost>,
                         std::vector<Bytes>, std::vector<std::vector<Option>>,
                         std::pair<Cost, Bytes>>;

enum Kind : Index { advance = 0, save = 1, backward = 2, turn = 3 };

// One option of a stage, with its sizes in slots.
struct Saving {
  Cost forward;  // -1: no forward
  Cost backward;
  Bytes saved;      // bytes, as the next three
  Bytes inside;     // what the backward needs of the stage
  Bytes workspace;  // of the forward
  Index passed;     // slots that stay while the stages above run
  Index kept;       // slots that stay when they are done
  Index need_counted;  // slots of the backward, with what is inside
  Index need_held;     // slots of the backward, without it
};

// What is asked of a chain, as remat.algorithms.chains.rotor_tables.check_chain.
struct Checked {
  Capped bytes;   // all sizes together
  Capped worst;   // no schedule without needless work takes longer
  Capped below;   // rows of the tables
  Capped held;
};
Checked check_chain(const Chain& chain);
void check_slots(Bytes slot_bytes, Index slots);

// own[m] = min(own[m], cost + first[m] + second[m]) for m < count.
void lower(Cost* own, Cost cost, const Cost* first, const Cost* second, Index count);

class Rotor {
 public:
  Rotor(const Chain& chain, Bytes slot_bytes, bool beyond)
      : values_(std::get<0>(chain)),
        gradients_(std::get<1>(chain)),
        forward_(std::get<2>(chain)),
        workspace_(std::get<3>(chain)),
        turn_(std::get<5>(chain)),
        slot_bytes_(slot_bytes),
        beyond_(beyond),
        length_(static_cast<Index>(forward_.size())) {
    const auto& options = std::get<4>(chain);
    Index count = 0;
    for (Index s = 0; s < length_; ++s) {
      first_option_.push_back(count);
      std::vector<Saving> own;
      for (const auto& option : options[at(s)]) {
        own.push_back(saving(s, option));
      }
      count += static_cast<Index>(own.size());
      savings_.push_back(std::move(own));
    }
    first_option_.push_back(count);
    until_.assign(at(length_ + 1), 0);
    for (Index s = 0; s < length_; ++s) {
      until_[at(s + 1)] = until_[at(s)] + forward_[at(s)];
      value_slots_.push_back(slots(values_[at(s)]));
    }
    value_slots_.push_back(slots(values_[at(length_)]));
  }

  std::optional<Answer> answer(Index count) {
    const Index memory = count - value_slots_[0];
    if (memory < 0) {
      return std::nullopt;
    }
    prepare(memory + 1);
    const Cost cost = below(0, length_)[memory];
    if (cost >= infinite) {
      return std::nullopt;
    }
    std::vector<Run> order;
    expand(0, length_, -1, memory, order);
    return Answer{cost, std::move(order)};
  }

  // Fills the tables for memory 0 .. width - 1. Where nothing may be dropped, those of
  // stages that have run are filled only if they are asked for, and for their own
  // backward only.
  void prepare(Index width, bool with_held = false) {
    width_ = width;
    with_held_ = with_held || beyond_;
    fill();
  }

  [[nodiscard]] Index length() const { return length_; }
  [[nodiscard]] Index slots(Bytes size) const {
    return static_cast<Index>((size + slot_bytes_ - 1) / slot_bytes_);
  }
  [[nodiscard]] Bytes value_bytes(Index v) const { return values_[at(v)]; }
  [[nodiscard]] Bytes gradient_bytes(Index v) const { return gradients_[at(v)]; }
  [[nodiscard]] Bytes workspace_bytes(Index s) const { return workspace_[at(s)]; }
  [[nodiscard]] Cost forward(Index s) const { return forward_[at(s)]; }
  [[nodiscard]] Index value_slots(Index v) const { return value_slots_[at(v)]; }
  [[nodiscard]] const std::vector<Saving>& savings(Index s) const {
    return savings_[at(s)];
  }

  // Row over memory of below(base, top), or of held(base, top, option) for option >= 0.
  const Cost* row(Index base, Index top, Index option) {
    return option < 0 ? below(base, top) : held(base, top, option);
  }

  // Appends what runs from a state of the table.
  void expand(Index base, Index top, Index option, Index memory,
              std::vector<Run>& order) {
    order_.clear();
    run({false, base, top, option, memory});
    order.insert(order.end(), order_.begin(), order_.end());
  }

 private:
  static std::size_t at(Index index) { return static_cast<std::size_t>(index); }

  [[nodiscard]] Saving saving(Index s, const Option& option) const {
    const auto& [ahead, back, saved, needs_output, ahead_workspace, back_workspace] =
        option;
    const Bytes output = values_[at(s + 1)];
    const Bytes inside = saved + (needs_output ? output : 0);
    const Bytes bare = gradients_[at(s + 1)] + gradients_[at(s)] + back_workspace;
    return {ahead,
            back,
            saved,
            inside,
            ahead_workspace,
            slots(saved + output),
            slots(inside),
            slots(bare + inside),
            slots(bare)};
  }

  [[nodiscard]] Bytes gradient(Index top) const {
    return top == length_ ? 0 : gradients_[at(top + 1)];
  }

  // Bytes that stage s needs while advancing from `base`, without the gradient above.
  [[nodiscard]] Bytes advance_bytes(Index base, Index s) const {
    return (s > base ? values_[at(s)] : 0) + values_[at(s + 1)] + workspace_[at(s)];
  }

  [[nodiscard]] Index save_need(Index s, const Saving& option, Index top,
                                bool is_base) const {
    const Bytes most = std::max(workspace_[at(s)], option.saved + option.workspace);
    const Bytes source = is_base ? 0 : values_[at(s)];
    return slots(source + values_[at(s + 1)] + most + gradient(top));
  }

  [[nodiscard]] Index cell(Index base, Index top) const {
    return base * (2 * length_ + 3 - base) / 2 + top - base;
  }

  Cost* below(Index base, Index top) { return below_.data() + cell(base, top) * width_; }

  // Rows of options of `top`, for bases 0 .. top.
  Cost* held(Index base, Index top, Index option) {
    return held_.data() + held_index(base, top, option) * width_;
  }

  [[nodiscard]] Index held_index(Index base, Index top, Index option) const {
    return held_first_[at(top)] + base * options_of(top) + option;
  }

  void fill() {
    const Index cells = (length_ + 1) * (length_ + 2) / 2;
    below_.assign(at(cells * width_), infinite);
    below_start_.assign(at(cells), width_);
    if (with_held_) {
      Index rows = 0;
      for (Index t = 0; t < length_; ++t) {
        held_first_.push_back(rows);
        rows += (t + 1) * (first_option_[at(t + 1)] - first_option_[at(t)]);
      }
      held_.assign(at(rows * width_), infinite);
      held_start_.assign(at(rows), width_);
    }
    for (Index base = length_; base >= 0; --base) {
      for (Index top = base; top <= length_; ++top) {
        check_signals();
        fill_below(base, top);
        below_start_[at(cell(base, top))] = start_of(below(base, top));
        if (with_held_ && top < length_ && (beyond_ || base == top)) {
          for (Index k = 0; k < options_of(top); ++k) {
            fill_held(base, top, k);
            held_start_[at(held_index(base, top, k))] = start_of(held(base, top, k));
          }
        }
      }
    }
  }

  [[nodiscard]] Index options_of(Index s) const {
    return first_option_[at(s + 1)] - first_option_[at(s)];
  }

  // A row over memory, and the least memory with which it is finite.
  struct Row {
    const Cost* costs;
    Index start;
  };

  Row below_row(Index base, Index top) {
    return {below(base, top), below_start_[at(cell(base, top))]};
  }

  Row held_row(Index base, Index top, Index option) {
    const Index index = held_index(base, top, option);
    return {held_.data() + index * width_, held_start_[at(index)]};
  }

  // own[m] = min(own[m], cost + first[m - less] + second[m + more]) for need <= m.
  void relax(Cost* own, Cost cost, Index need, Row first, Index less, Row second,
             Index more) const {
    const Index from = std::max({need, less + first.start, second.start - more});
    const Index end = std::min(width_, width_ - more);
    if (from < end) {
      lower(own + from, cost, first.costs + (from - less), second.costs + (from + more),
            end - from);
    }
  }

  void relax(Cost* own, Cost cost, Index need, Row first, Index less) const {
    const Index from = std::max(need, less + first.start);
    for (Index m = from; m < width_; ++m) {
      own[m] = std::min(own[m], cost + first.costs[m - less]);
    }
  }

  void fill_below(Index base, Index top) {
    Cost* own = below(base, top);
    if (base == top) {
      fill_single(base, own);
      return;
    }
    Bytes most = 0;
    for (Index v = base + 1; v <= top; ++v) {
      most = std::max(most, advance_bytes(base, v - 1));
      const Index need = slots(most + gradient(top));
      const Cost sweep = until_[at(v)] - until_[at(base)];
      relax(own, sweep, need, below_row(v, top), value_slots_[at(v)],
            below_row(base, v - 1), 0);
      if (!beyond_ || v >= top || v >= length_) {
        continue;
      }
      for (Index k = 0; k < options_of(v); ++k) {
        const Saving& option = savings_[at(v)][at(k)];
        if (option.forward >= 0) {
          relax(own, sweep + option.forward,
                std::max(need, save_need(v, option, top, false)), below_row(v + 1, top),
                option.passed, held_row(base, v, k), -option.kept);
        }
      }
    }
    for (const Saving& option : savings_[at(base)]) {
      if (option.forward >= 0) {
        const Index need =
            std::max(save_need(base, option, top, true), option.need_counted);
        relax(own, option.forward + option.backward, need, below_row(base + 1, top),
              option.passed);
      }
    }
    cap(own);
  }

  void fill_single(Index stage, Cost* own) const {
    if (stage == length_) {
      const Index need = slots(gradients_[at(stage)] + turn_.second);
      for (Index m = need; m < width_; ++m) {
        own[m] = turn_.first;
      }
      return;
    }
    for (const Saving& option : savings_[at(stage)]) {
      const Cost cost = std::max<Cost>(option.forward, 0) + option.backward;
      for (Index m = single_need(stage, option); m < width_; ++m) {
        own[m] = std::min(own[m], cost);
      }
    }
  }

  [[nodiscard]] Index single_need(Index stage, const Saving& option) const {
    return option.forward < 0 ? option.need_counted
                              : std::max(option.need_counted,
                                         save_need(stage, option, stage, true));
  }

  void fill_held(Index base, Index top, Index option) {
    Cost* own = held(base, top, option);
    const Saving& on_top = savings_[at(top)][at(option)];
    if (base == top) {
      for (Index m = on_top.need_held; m < width_; ++m) {
        own[m] = on_top.backward;
      }
      return;
    }
    Bytes most = 0;
    for (Index v = base + 1; v <= top; ++v) {
      most = std::max(most, advance_bytes(base, v - 1));
      const Index need = slots(most + gradient(top));
      const Cost sweep = until_[at(v)] - until_[at(base)];
      relax(own, sweep, need, held_row(v, top, option), value_slots_[at(v)],
            below_row(base, v - 1), on_top.kept);
      if (v == top) {
        break;
      }
      for (Index k = 0; k < options_of(v); ++k) {
        const Saving& saving = savings_[at(v)][at(k)];
        if (saving.forward >= 0) {
          relax(own, sweep + saving.forward,
                std::max(need, save_need(v, saving, top, false)),
                held_row(v + 1, top, option), saving.passed, held_row(base, v, k),
                on_top.kept - saving.kept);
        }
      }
    }
    for (const Saving& saving : savings_[at(base)]) {
      if (saving.forward >= 0) {
        const Index need = std::max(save_need(base, saving, top, true),
                                    saving.need_counted - on_top.kept);
        relax(own, saving.forward + saving.backward, need, held_row(base + 1, top, option),
              saving.passed);
      }
    }
    cap(own);
  }

  void cap(Cost* own) const {
    for (Index m = 0; m < width_; ++m) {
      own[m] = capped(own[m]);
    }
  }

  [[nodiscard]] Index start_of(const Cost* own) const {
    return std::find_if(own, own + width_, [](Cost cost) { return cost < infinite; }) -
           own;
  }

  // --- the schedule ---------------------------------------------------------------

  // What is left to do: below if option < 0, else held; or a backward on its own.
  struct Task {
    bool is_backward;
    Index base;
    Index top;
    Index option;
    Index memory;
  };

  // The best way found so far of a state.
  struct Way {
    Cost cost = infinite;
    Index value = -1;   // advanced to, -1 if the base stage is run with an option
    Index option = -1;  // of the stage that is run at the value or the base
  };

  void run(const Task& start) {
    std::vector<Task> pending{start};
    while (!pending.empty()) {
      const Task task = pending.back();
      pending.pop_back();
      if (task.is_backward) {
        order_.emplace_back(backward, task.base, task.option);
      } else if (task.base == task.top) {
        run_single(task);
      } else {
        run_way(task, best_way(task), pending);
      }
    }
  }

  void run_single(const Task& task) {
    if (task.option >= 0) {
      order_.emplace_back(backward, task.top, task.option);
      return;
    }
    if (task.base == length_) {
      order_.emplace_back(turn, -1, -1);
      return;
    }
    Cost best = infinite;
    Index chosen = 0;
    for (Index k = 0; k < options_of(task.base); ++k) {
      const Saving& option = savings_[at(task.base)][at(k)];
      const Cost cost = std::max<Cost>(option.forward, 0) + option.backward;
      if (task.memory >= single_need(task.base, option) && cost < best) {
        best = cost;
        chosen = k;
      }
    }
    if (savings_[at(task.base)][at(chosen)].forward >= 0) {
      order_.emplace_back(save, task.base, chosen);
    }
    order_.emplace_back(backward, task.base, chosen);
  }

  // Slots that come back once the backward of the top stage is done.
  [[nodiscard]] Index freed(const Task& task) const {
    return task.option < 0 ? 0 : savings_[at(task.top)][at(task.option)].kept;
  }

  Cost look_above(const Task& task, Index base, Index memory) {
    if (memory < 0) {
      return infinite;
    }
    return task.option < 0 ? below(base, task.top)[memory]
                           : held(base, task.top, task.option)[memory];
  }

  Cost look(const Cost* row, Index memory) const {
    return memory < 0 || memory >= width_ ? infinite : row[memory];
  }

  static void offer(Way& best, Cost cost, Index value, Index option) {
    if (cost < best.cost) {
      best = {cost, value, option};
    }
  }

  Way best_way(const Task& task) {
    Way best;
    const Index m = task.memory;
    Bytes most = 0;
    for (Index v = task.base + 1; v <= task.top; ++v) {
      most = std::max(most, advance_bytes(task.base, v - 1));
      if (m < slots(most + gradient(task.top))) {
        break;
      }
      const Cost cost = until_[at(v)] - until_[at(task.base)] +
                        look_above(task, v, m - value_slots_[at(v)]) +
                        look(below(task.base, v - 1), m + freed(task));
      offer(best, cost, v, -1);
    }
    for (Index k = 0; k < options_of(task.base); ++k) {
      const Saving& option = savings_[at(task.base)][at(k)];
      const Index need = std::max(save_need(task.base, option, task.top, true),
                                  option.need_counted - freed(task));
      if (option.forward >= 0 && m >= need) {
        const Cost cost = option.forward + option.backward +
                          look_above(task, task.base + 1, m - option.passed);
        offer(best, cost, -1, k);
      }
    }
    if (beyond_) {
      best_dropping_way(task, best);
    }
    return best;
  }

  void best_dropping_way(const Task& task, Way& best) {
    const Index m = task.memory;
    Bytes most = 0;
    for (Index v = task.base + 1; v < std::min(task.top, length_); ++v) {
      most = std::max(most, advance_bytes(task.base, v - 1));
      if (m < slots(most + gradient(task.top))) {
        break;
      }
      for (Index k = 0; k < options_of(v); ++k) {
        const Saving& option = savings_[at(v)][at(k)];
        if (option.forward < 0 || m < save_need(v, option, task.top, false)) {
          continue;
        }
        const Cost cost = until_[at(v)] - until_[at(task.base)] + option.forward +
                          look_above(task, v + 1, m - option.passed) +
                          look(held(task.base, v, k), m + freed(task) - option.kept);
        offer(best, cost, v, k);
      }
    }
  }

  void run_way(const Task& task, const Way& way, std::vector<Task>& pending) {
    const Index m = task.memory;
    if (way.value < 0) {
      order_.emplace_back(save, task.base, way.option);
      pending.push_back({true, task.base, task.base, way.option, 0});
      const Saving& option = savings_[at(task.base)][at(way.option)];
      pending.push_back(
          {false, task.base + 1, task.top, task.option, m - option.passed});
      return;
    }
    for (Index s = task.base; s < way.value; ++s) {
      order_.emplace_back(advance, s, -1);
    }
    const Index after = m + freed(task);
    if (way.option < 0) {
      pending.push_back({false, task.base, way.value - 1, -1, after});
      pending.push_back(
          {false, way.value, task.top, task.option, m - value_slots_[at(way.value)]});
      return;
    }
    order_.emplace_back(save, way.value, way.option);
    const Saving& option = savings_[at(way.value)][at(way.option)];
    pending.push_back({false, task.base, way.value, way.option, after - option.kept});
    pending.push_back(
        {false, way.value + 1, task.top, task.option, m - option.passed});
  }

  std::vector<Bytes> values_;
  std::vector<Bytes> gradients_;
  std::vector<Cost> forward_;
  std::vector<Bytes> workspace_;
  std::vector<std::vector<Saving>> savings_;
  std::vector<Index> first_option_;
  std::vector<Index> value_slots_;
  std::vector<Cost> until_;
  std::pair<Cost, Bytes> turn_;
  Bytes slot_bytes_;
  bool beyond_;
  bool with_held_ = false;
  Index length_;
  Index width_ = 0;
  std::vector<Cost> below_;
  std::vector<Cost> held_;
  std::vector<Index> below_start_;
  std::vector<Index> held_start_;
  std::vector<Index> held_first_;
  std::vector<Run> order_;
};

}  // namespace remat::chains::rotor
