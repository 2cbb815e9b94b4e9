// Native twin of remat.search.retention_table.
#pragma once

#include <nanobind/nanobind.h>

namespace remat {

void bind_retention(nanobind::module_& module);

}  // namespace remat
