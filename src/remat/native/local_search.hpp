// Orders of runs that are changed a little and weighed at once; see remat.search.local_moves.
#pragma once

#include <nanobind/nanobind.h>

namespace remat {

void bind_local_search(nanobind::module_& module);

}  // namespace remat
