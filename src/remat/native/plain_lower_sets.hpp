// The recurrence over lower sets, written down plainly: for comparison of planning times.
#pragma once

#include <nanobind/nanobind.h>

namespace remat {

void bind_plain_lower_sets(nanobind::module_& module);

}  // namespace remat
