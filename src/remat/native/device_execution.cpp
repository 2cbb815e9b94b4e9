// Execution of a graph on several devices within their budgets: native twin of
// remat.search.device_execution_run, which says what each step means. Both do the same
// arithmetic in the same order.

#include "device_execution.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
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
using Table = std::vector<Indices>;
using Flags = std::vector<bool>;
using Note = std::tuple<Index, Index, Index>;

using Ops = std::tuple<Table, Table, Flags, Flags, Flags, Table, Table>;
using Blocks = std::tuple<Indices, Indices, Flags, Indices>;
using Passes = std::tuple<Indices, Indices, Indices, Indices>;
using Graph = std::tuple<Ops, Blocks, Passes>;
using Routes = std::tuple<std::vector<std::vector<double>>, Table>;
using Prices = std::tuple<double, double, double, std::int64_t>;
using Bounds = std::tuple<Indices, std::int64_t>;

constexpr Index kBoundary = -1;
constexpr Index kEnd = -2;
constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr std::size_t kClosureLimit = 16;
constexpr int kDepthLimit = 250;
constexpr double kLeastPriceNs = 1e-3;

// The execution cannot go on within the limits.
struct Stuck {};

class DeviceExecution {
 public:
  DeviceExecution(Indices base, Table placement, Graph graph, Routes routes,
                  Prices prices, Bounds bounds, std::optional<double> time_limit_s)
      : watch_(time_limit_s),
        base_(std::move(base)),
        placement_(std::move(placement)),
        reads_(std::move(std::get<0>(std::get<0>(graph)))),
        writes_(std::move(std::get<1>(std::get<0>(graph)))),
        is_recomputable_(std::move(std::get<2>(std::get<0>(graph)))),
        is_external_(std::move(std::get<3>(std::get<0>(graph)))),
        is_forward_(std::move(std::get<4>(std::get<0>(graph)))),
        cost_(std::move(std::get<5>(std::get<0>(graph)))),
        workspace_(std::move(std::get<6>(std::get<0>(graph)))),
        size_(std::move(std::get<0>(std::get<1>(graph)))),
        home_(std::move(std::get<1>(std::get<1>(graph)))),
        is_resident_(std::move(std::get<2>(std::get<1>(graph)))),
        producers_(std::move(std::get<3>(std::get<1>(graph)))),
        forward_outputs_(std::move(std::get<0>(std::get<2>(graph)))),
        tangents_(std::move(std::get<1>(std::get<2>(graph)))),
        final_outputs_(std::move(std::get<2>(std::get<2>(graph)))),
        held_outputs_(std::move(std::get<3>(std::get<2>(graph)))),
        route_ns_(std::move(std::get<0>(routes))),
        next_(std::move(std::get<1>(routes))),
        size_exponent_(std::get<0>(prices)),
        distance_exponent_(std::get<1>(prices)),
        ancestor_share_(std::get<2>(prices)),
        copy_percent_(static_cast<double>(std::get<3>(prices))),
        limit_(std::move(std::get<0>(bounds))),
        run_limit_(std::get<1>(bounds)),
        count_(limit_.size()),
        live_(count_, std::vector<char>(size_.size(), 0)),
        live_count_(size_.size(), 0),
        used_(count_, 0),
        pins_(count_, Indices(size_.size(), 0)),
        is_done_(reads_.size(), 0),
        uses_(count_, Table(size_.size())),
        left_(size_.size(), 0),
        seen_(reads_.size(), 0) {
    for (const auto& costs : cost_) {
      std::int64_t least = -1;
      for (const auto cost : costs) {
        if (cost >= 0 && (least < 0 || cost < least)) least = cost;
      }
      cheapest_.push_back(static_cast<double>(std::max<std::int64_t>(least, 0)));
    }
    for (const auto size : size_) {
      weight_.push_back(std::pow(static_cast<double>(size), size_exponent_));
    }
    for (std::size_t position = base_.size(); position-- > 0;) note_uses(position);
  }

  std::vector<Note> run() {
    for (now_ = 0; now_ < base_.size(); ++now_) {
      const Index item = base_[now_];
      if (item == kBoundary) {
        pass_boundary();
      } else if (item == kEnd) {
        bring_home(final_outputs_, false);
      } else {
        run_first(item);
      }
    }
    return std::move(notes_);
  }

 private:
  static std::size_t at(Index index) { return static_cast<std::size_t>(index); }

  void note_uses(std::size_t position) {
    const Index item = base_[position];
    const auto note = [&](Index storage, Index device) {
      uses_[at(device)][at(storage)].push_back(static_cast<Index>(position));
      ++left_[at(storage)];
    };
    if (item >= 0) {
      for (const Index device : placement_[at(item)]) {
        for (const Index s : reads_[at(item)]) note(s, device);
      }
    } else {
      for (const Index s : item == kEnd ? final_outputs_ : forward_outputs_) {
        note(s, home_[at(s)]);
      }
    }
  }

  // --- the base ---------------------------------------------------------------

  void run_first(Index op) {
    watch_.look();
    const bool is_external = is_external_[at(op)];
    if (is_external && callers_end_ < 0) prepare_callers_work(op);
    for (const Index device : placement_[at(op)]) {
      run_op(op, device, 0);
      if (is_external) {
        const Index end = is_forward_[at(op)] ? kBoundary : kEnd;
        callers_end_ = std::ranges::find(base_, end) - base_.begin();
      }
    }
    is_done_[at(op)] = 1;
    for (const Index device : placement_[at(op)]) {
      for (const Index s : reads_[at(op)]) pop_use(s, device);
    }
    for (const Index s : reads_[at(op)]) drop_if_idle(s);
    for (const Index s : writes_[at(op)]) drop_if_idle(s);
  }

  void pop_use(Index storage, Index device) {
    uses_[at(device)][at(storage)].pop_back();
    --left_[at(storage)];
  }

  // Does what cannot be done once the caller's work has begun: run and copy.
  void prepare_callers_work(Index op) {
    const bool is_forward = is_forward_[at(op)];
    Indices outputs;
    for (const Index s : is_forward ? forward_outputs_ : final_outputs_) {
      if (!is_callers(s)) outputs.push_back(s);
    }
    bring_home(outputs, true);
    if (is_forward) make_room_for_tangents();
  }

  bool is_callers(Index storage) const {
    const Index op = producers_[at(storage)];
    return op >= 0 && is_external_[at(op)];
  }

  void bring_home(const Indices& storages, bool stays) {
    for (const Index s : storages) {
      ensure(s, home_[at(s)], 0);
      ++pins_[at(home_[at(s)])][at(s)];
    }
    if (stays) return;
    for (const Index s : storages) --pins_[at(home_[at(s)])][at(s)];
  }

  void pass_boundary() {
    bring_home(forward_outputs_, true);
    make_room_for_tangents();
    for (auto& pins : pins_) std::ranges::fill(pins, 0);
    for (const Index s : tangents_) add(s, home_[at(s)]);
    notes_.emplace_back(kBoundary, kBoundary, kBoundary);
    callers_end_ = -1;
    for (const Index s : held_outputs_) ++pins_[at(home_[at(s)])][at(s)];
    for (const Index s : forward_outputs_) pop_use(s, home_[at(s)]);
    for (const Index s : forward_outputs_) drop_if_idle(s);
    for (const Index s : tangents_) drop_if_idle(s);
  }

  void make_room_for_tangents() {
    Indices needed(count_, 0);
    for (const Index s : tangents_) needed[at(home_[at(s)])] += size_[at(s)];
    for (std::size_t device = 0; device < count_; ++device) {
      if (needed[device] != 0) make_room(static_cast<Index>(device), needed[device]);
    }
  }

  // --- what is where ----------------------------------------------------------

  bool lives_at(Index storage, Index device) const {
    return is_resident_[at(storage)] && home_[at(storage)] == device;
  }

  bool is_at(Index storage, Index device) const {
    return live_[at(device)][at(storage)] != 0 || lives_at(storage, device);
  }

  Index holder_count(Index storage) const {
    const bool is_only_home =
        is_resident_[at(storage)] && live_[at(home_[at(storage)])][at(storage)] == 0;
    return live_count_[at(storage)] + (is_only_home ? 1 : 0);
  }

  void add(Index storage, Index device) {
    auto& live = live_[at(device)][at(storage)];
    if (live != 0) return;
    live = 1;
    ++live_count_[at(storage)];
    used_[at(device)] += size_[at(storage)];
  }

  void drop(Index storage, Index device) {
    auto& live = live_[at(device)][at(storage)];
    if (live == 0) return;
    live = 0;
    --live_count_[at(storage)];
    used_[at(device)] -= size_[at(storage)];
  }

  void drop_if_idle(Index storage) {
    for (Index device = 0; at(device) < count_; ++device) {
      if (live_[at(device)][at(storage)] == 0) continue;
      if (pins_[at(device)][at(storage)] != 0) continue;
      const bool is_spare =
          uses_[at(device)][at(storage)].empty() && holder_count(storage) > 1;
      if (is_spare || left_[at(storage)] == 0) drop(storage, device);
    }
  }

  // --- bringing things in -----------------------------------------------------

  double route_ns(Index storage, Index source, Index target) const {
    return route_ns_[at(source) * count_ + at(target)][at(storage)];
  }

  Index next_on_route(Index storage, Index source, Index target) const {
    return next_[at(source) * count_ + at(target)][at(storage)];
  }

  std::pair<double, Index> copy_time(Index storage, Index target) const {
    double best = kNever;
    Index holder = -1;
    for (Index source = 0; at(source) < count_; ++source) {
      if (!is_at(storage, source)) continue;
      const double route = route_ns(storage, source, target);
      if (holder < 0 || route < best) {
        best = route;
        holder = source;
      }
    }
    return {best, holder};
  }

  void ensure(Index storage, Index device, int depth) {
    if (is_at(storage, device)) return;
    if (depth > kDepthLimit || callers_end_ >= 0) throw Stuck{};
    auto [copy_ns, source] = copy_time(storage, device);
    const Index op = producers_[at(storage)];
    const bool may_run = op >= 0 && may_rerun(op);
    if (may_run && cost_here(op, device) < copy_ns) {
      run_op(op, device, depth + 1);
      return;
    }
    if (std::isinf(copy_ns)) {
      if (!may_run) throw Stuck{};
      const Index where = rerun_device(op, storage, device);
      run_op(op, where, depth + 1);
      if (where == device) return;
      source = where;
    }
    copy(storage, source, device);
  }

  void copy(Index storage, Index source, Index target) {
    Index here = source;
    std::size_t hops = 0;
    const bool is_pinned = !lives_at(storage, source);
    if (is_pinned) ++pins_[at(source)][at(storage)];
    while (here != target) {
      const Index there = next_on_route(storage, here, target);
      if (there < 0 || ++hops > count_) throw Stuck{};
      if (!is_at(storage, there)) {
        make_room(there, size_[at(storage)]);
        notes_.emplace_back(storage, here, there);
        add(storage, there);
      }
      const bool is_idle =
          uses_[at(here)][at(storage)].empty() && pins_[at(here)][at(storage)] == 0;
      if (here != source && is_idle) drop(storage, here);
      here = there;
    }
    if (is_pinned) --pins_[at(source)][at(storage)];
  }

  bool may_rerun(Index op) const {
    return is_done_[at(op)] != 0 && is_recomputable_[at(op)];
  }

  double cost_here(Index op, Index device) const {
    const std::int64_t cost = cost_[at(op)][at(device)];
    if (cost < 0) return kNever;
    for (const Index s : reads_[at(op)]) {
      if (!is_at(s, device)) return kNever;
    }
    return static_cast<double>(cost);
  }

  double rerun_price(Index op, Index storage, Index where, Index device) {
    const std::int64_t cost = cost_[at(op)][at(where)];
    if (cost < 0) return kNever;
    double total = static_cast<double>(cost);
    for (const Index s : reads_[at(op)]) {
      if (!is_at(s, where)) total += std::min(copy_time(s, where).first, remake_time(s));
    }
    if (where != device) total += route_ns(storage, where, device);
    return total;
  }

  Index rerun_device(Index op, Index storage, Index device) {
    Index best = -1;
    double least = kNever;
    for (Index where = 0; at(where) < count_; ++where) {
      const double price = rerun_price(op, storage, where, device);
      if (price < least) {
        best = where;
        least = price;
      }
    }
    if (best < 0) throw Stuck{};
    return best;
  }

  void run_op(Index op, Index device, int depth) {
    ++runs_;
    if (cost_[at(op)][at(device)] < 0 || runs_ > run_limit_) throw Stuck{};
    auto& pins = pins_[at(device)];
    for (const Index s : reads_[at(op)]) {
      ensure(s, device, depth);
      ++pins[at(s)];
    }
    std::int64_t added = workspace_[at(op)][at(device)];
    for (const Index s : writes_[at(op)]) added += size_[at(s)];
    make_room(device, added);
    notes_.emplace_back(op, device, -1);
    for (const Index s : writes_[at(op)]) add(s, device);
    for (const Index s : reads_[at(op)]) --pins[at(s)];
    if (depth != 0) {
      for (const Index s : reads_[at(op)]) drop_if_idle(s);
    }
  }

  // --- eviction ---------------------------------------------------------------

  void make_room(Index device, std::int64_t size_bytes) {
    std::int64_t excess = used_[at(device)] + size_bytes - limit_[at(device)];
    if (excess <= 0) return;
    const auto& live = live_[at(device)];
    const auto& pins = pins_[at(device)];
    std::vector<std::pair<double, Index>> victims;
    for (std::size_t s = 0; s < size_.size(); ++s) {
      if (live[s] != 0 && pins[s] == 0 && size_[s] != 0) {
        const auto storage = static_cast<Index>(s);
        victims.emplace_back(score(storage, device), storage);
      }
    }
    std::ranges::sort(victims);
    for (const auto& [value, storage] : victims) {
      if (excess <= 0 || std::isinf(value)) break;
      if (evict(storage, device)) excess -= size_[at(storage)];
    }
    if (excess > 0) throw Stuck{};
  }

  double score(Index storage, Index device) {
    const double value = price(storage, device).first;
    auto next_use = static_cast<Index>(base_.size());
    for (const auto& on : uses_) {
      const auto& uses = on[at(storage)];
      if (!uses.empty()) next_use = std::min(next_use, uses.back());
    }
    if (next_use <= callers_end_) return kNever;
    const auto ahead = next_use - static_cast<Index>(now_);
    const auto distance = static_cast<double>(std::max<Index>(1, ahead));
    return std::max(value, kLeastPriceNs) /
           (weight_[at(storage)] * std::pow(distance, distance_exponent_));
  }

  // The time to have a storage back, and where to copy it, or -1.
  std::pair<double, Index> price(Index storage, Index device) {
    if (left_[at(storage)] == 0 || holder_count(storage) > 1) {
      if (uses_[at(device)][at(storage)].empty()) return {0.0, -1};
      double back = kNever;
      for (Index other = 0; at(other) < count_; ++other) {
        if (other != device && is_at(storage, other)) {
          back = std::min(back, route_ns(storage, other, device));
        }
      }
      return {back * copy_percent_ / 100.0, -1};
    }
    const Index following = next_user(storage);
    double best = remake_time(storage);
    Index goal = -1;
    for (Index other = 0; at(other) < count_; ++other) {
      const bool is_full = used_[at(other)] + size_[at(storage)] > limit_[at(other)];
      if (other == device || is_full || callers_end_ >= 0) continue;
      if (next_on_route(storage, device, other) != other) continue;
      // Nothing where it has to go anyway.
      double there_ns = 0.0;
      if (other != following) {
        there_ns = route_ns(storage, device, other);
        there_ns += route_ns(storage, other, following);
        if (following != device) there_ns -= route_ns(storage, device, following);
      }
      there_ns = there_ns * copy_percent_ / 100.0;
      if (there_ns < best) {
        best = there_ns;
        goal = other;
      }
    }
    return {best, goal};
  }

  Index next_user(Index storage) const {
    Index following = -1;
    auto position = static_cast<Index>(base_.size());
    for (Index other = 0; at(other) < count_; ++other) {
      const auto& uses = uses_[at(other)][at(storage)];
      if (!uses.empty() && uses.back() < position) {
        following = other;
        position = uses.back();
      }
    }
    return following;
  }

  double remake_time(Index storage) {
    const Index op = producers_[at(storage)];
    if (op < 0 || !may_rerun(op)) return kNever;
    double total = cheapest_[at(op)];
    ++round_;
    seen_[at(op)] = round_;
    pending_.assign(1, op);
    for (std::size_t next = 0; next < pending_.size(); ++next) {
      for (const Index s : reads_[at(pending_[next])]) {
        if (is_resident_[at(s)] || live_count_[at(s)] != 0) continue;
        const Index ancestor = producers_[at(s)];
        if (ancestor >= 0 && seen_[at(ancestor)] == round_) continue;
        if (ancestor < 0 || !may_rerun(ancestor)) return kNever;
        const double share = left_[at(s)] != 0 ? ancestor_share_ : 1.0;
        total += share * cheapest_[at(ancestor)];
        seen_[at(ancestor)] = round_;
        pending_.push_back(ancestor);
      }
      if (pending_.size() > kClosureLimit) break;
    }
    return total;
  }

  bool evict(Index storage, Index device) {
    const auto [value, goal] = price(storage, device);
    if (std::isinf(value)) return false;
    if (goal >= 0) {
      notes_.emplace_back(storage, device, goal);
      add(storage, goal);
    }
    drop(storage, device);
    return true;
  }

  Watch watch_;
  Indices base_;
  Table placement_;
  Table reads_;
  Table writes_;
  Flags is_recomputable_;
  Flags is_external_;
  Flags is_forward_;
  Table cost_;
  Table workspace_;
  Indices size_;
  Indices home_;
  Flags is_resident_;
  Indices producers_;
  Indices forward_outputs_;
  Indices tangents_;
  Indices final_outputs_;
  Indices held_outputs_;
  std::vector<std::vector<double>> route_ns_;
  Table next_;
  double size_exponent_;
  double distance_exponent_;
  double ancestor_share_;
  double copy_percent_;
  Indices limit_;
  std::int64_t run_limit_;
  std::size_t count_;
  std::vector<double> cheapest_;
  std::vector<double> weight_;
  std::vector<std::vector<char>> live_;
  Indices live_count_;
  Indices used_;
  std::vector<Indices> pins_;
  std::vector<char> is_done_;
  // Per device and storage, the positions of its uses there, the next one last.
  std::vector<Table> uses_;
  Indices left_;
  std::vector<std::uint64_t> seen_;
  std::uint64_t round_ = 0;
  Indices pending_;
  std::vector<Note> notes_;
  std::int64_t runs_ = 0;
  std::size_t now_ = 0;
  // While the caller works, the position at which the pass ends; else -1.
  Index callers_end_ = -1;
};

// As remat.search.device_execution_run.check_execution.
void check_ops(const Ops& ops, std::size_t storages, std::size_t devices) {
  const auto& [reads, writes, is_recomputable, is_external, is_forward, costs, workspaces] =
      ops;
  const std::size_t count = reads.size();
  require(writes.size() == count && is_recomputable.size() == count &&
              is_external.size() == count && is_forward.size() == count &&
              costs.size() == count && workspaces.size() == count,
          "the lists of ops differ in length");
  for (const auto* const lists : {&reads, &writes}) {
    for (const auto& list : *lists) {
      check_indices(list, storages, "there is no such storage");
    }
  }
  Capped time(0);
  for (std::size_t op = 0; op < count; ++op) {
    require(costs[op].size() == devices && workspaces[op].size() == devices,
            "an op needs one time and one workspace per device");
    for (const std::int64_t cost : costs[op]) {
      require(cost >= -1, "a time is less than -1");
      time += Capped(std::max<std::int64_t>(cost, 0));
    }
    require(total(workspaces[op]).value() <= kMostTotal, "a workspace is beyond 2**60");
  }
  require(time.value() <= kMostTotal, "times add up to more than 2**60");
}

void check_execution(const Indices& base, const Table& placement, const Graph& graph,
                     const Routes& routes, const Prices& prices, const Bounds& bounds) {
  const auto& [ops, blocks, passes] = graph;
  const auto& [sizes, homes, is_resident, producers] = blocks;
  const auto& [times, nexts] = routes;
  const auto& [size_exponent, distance_exponent, ancestor_share, copy_percent] = prices;
  const auto& [limits, run_limit] = bounds;
  const std::size_t count = std::get<0>(ops).size();
  const std::size_t storages = sizes.size();
  const std::size_t devices = limits.size();
  require(devices >= 1, "there must be at least one device");
  check_ops(ops, storages, devices);
  require(placement.size() == count, "each op needs its devices");
  for (const auto& list : placement) {
    check_indices(list, devices, "there is no such device");
  }
  require(homes.size() == storages && is_resident.size() == storages &&
              producers.size() == storages,
          "the lists of storages differ in length");
  require(total(sizes).value() <= kMostTotal, "sizes add up to more than 2**60");
  check_indices(homes, devices, "there is no such device");
  check_indices(producers, count, "there is no such op", -1);
  check_indices(base, count, "a step names an op that does not exist", kEnd);
  require(std::ranges::count(base, kBoundary) == 1, "the steps need one boundary");
  for (const auto* const list : {&std::get<0>(passes), &std::get<1>(passes),
                                 &std::get<2>(passes), &std::get<3>(passes)}) {
    check_indices(*list, storages, "there is no such storage");
  }
  require(times.size() == devices * devices && nexts.size() == devices * devices,
          "each pair of devices needs its routes");
  for (std::size_t pair = 0; pair < times.size(); ++pair) {
    require(times[pair].size() == storages && nexts[pair].size() == storages,
            "each storage needs its routes");
    for (const double time : times[pair]) {
      require(time >= 0.0, "a route takes no time that can be");
    }
    check_indices(nexts[pair], devices, "there is no such device", -1);
  }
  check_exponent(size_exponent);
  check_exponent(distance_exponent);
  check_share(ancestor_share);
  require(copy_percent >= 1 && copy_percent <= 1'000'000'000,
          "the percentage of copies is not between 1 and 10**9");
  for (const std::int64_t limit : limits) {
    require(limit >= -kMostTotal, "a limit is less than -2**60");
  }
  require(run_limit >= 0, "the limit of runs is negative");
}

std::optional<std::vector<Note>> run_on_devices(
    Indices base, Table placement, Graph graph, Routes routes, Prices prices,
    Bounds bounds, std::optional<double> time_limit_s) {
  check_execution(base, placement, graph, routes, prices, bounds);
  try {
    return DeviceExecution(std::move(base), std::move(placement), std::move(graph),
                           std::move(routes), prices, std::move(bounds), time_limit_s)
        .run();
  } catch (const Stuck&) {
    return std::nullopt;
  } catch (const TimeUp&) {
    return std::nullopt;
  }
}

}  // namespace

void bind_device_execution(nb::module_& module) {
  module.def("run_on_devices", &run_on_devices, nb::arg("base"), nb::arg("placement"),
             nb::arg("graph"), nb::arg("routes"), nb::arg("prices"), nb::arg("bounds"),
             nb::arg("time_limit_s").none());
}

}  // namespace remat
