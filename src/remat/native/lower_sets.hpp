// Increasing sequences of lower sets: what lower_sets.cpp binds.
#pragma once

#include <nanobind/nanobind.h>

namespace remat {

void bind_lower_sets(nanobind::module_& module);

}  // namespace remat
