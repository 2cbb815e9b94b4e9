// What the files chains_*.cpp share: infinite cost, saturating sums, interruption.
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>

#include "watch.hpp"

namespace remat::chains {

using Cost = std::int64_t;

// Cost of what cannot be done. Callers keep finite sums below it, so that a few of them
// add up without overflow.
inline constexpr Cost infinite = Cost{1} << 61;

inline Cost capped(Cost cost) { return std::min(cost, infinite); }

// Lets Ctrl-C and the caller's deadline end a long computation; called once per outer loop.
inline void check_signals() {
  if (PyErr_CheckSignals() != 0) {
    throw nanobind::python_error();
  }
  check_time();
}

void bind_joins(nanobind::module_& module);
void bind_levels(nanobind::module_& module);
void bind_rotor(nanobind::module_& module);
void bind_stage_joins(nanobind::module_& module);

}  // namespace remat::chains

namespace remat {

void bind_chains(nanobind::module_& module);

}  // namespace remat


