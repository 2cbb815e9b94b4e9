// A deadline and Ctrl-C for loops that may run long, looked at after enough work.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <optional>

#include "checks.hpp"

namespace remat {

// Raises remat.core.deadline.TimeIsUpError once the deadline of the caller has passed. Needs the GIL.
inline void check_time() { nanobind::module_::import_("remat.core.deadline").attr("check_time")(); }

// Thrown when the time is up; carries nothing, the caller knows its best answer.
struct TimeUp {};

class Watch {
 public:
  explicit Watch(std::optional<double> time_limit_s) {
    require(!time_limit_s || !std::isnan(*time_limit_s), "the time limit is not a number");
    // A limit of a century is none; more would overflow the clock.
    if (time_limit_s && *time_limit_s < 3.0e9) {
      const double limit_s = std::max(*time_limit_s, 0.0);
      deadline_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                     std::chrono::duration<double>(limit_s));
    }
  }

  // Count some steps of a few nanoseconds each. Throws TimeUp, or the exception of a
  // pending signal (nanobind turns it back into KeyboardInterrupt).
  void spend(std::int64_t steps) {
    spent_ += steps;
    if (spent_ < kStepsBetweenLooks) return;
    spent_ = 0;
    look();
  }

  void look() const {
    {
      nanobind::gil_scoped_acquire hold;
      if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
      if (!deadline_) check_time();
    }
    if (deadline_ && Clock::now() >= *deadline_) throw TimeUp{};
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::int64_t kStepsBetweenLooks = std::int64_t{1} << 21;

  std::optional<Clock::time_point> deadline_;
  std::int64_t spent_ = 0;
};

}  // namespace remat
