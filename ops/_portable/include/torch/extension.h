// Stands in for torch's header of this name, so that DeepSpeed's CPU optimizers compile unmodified without libtorch,
// libpython or pybind11: scalar.h and tensor.h are the little of c10 and at that they use, table.h takes PYBIND11_MODULE.
#pragma once
// torch's header brings these in, and the kernels rely on it. <math.h> of libstdc++ also puts the float overloads of
// sqrt and pow into the global namespace: without it the scalar kernels compute in double, and differ in the last bit.
#include <math.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "dsops/scalar.h"
#include "dsops/table.h"
#include "dsops/tensor.h"
