// Native twin of remat.search.eviction_run.
#pragma once

#include <nanobind/nanobind.h>

namespace remat {

void bind_eviction(nanobind::module_& module);

}  // namespace remat
