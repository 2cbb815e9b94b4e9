// Native twin of remat.search.device_execution_run.
#pragma once

#include <nanobind/nanobind.h>

namespace remat {

void bind_device_execution(nanobind::module_& module);

}  // namespace remat
