// The shim's 16-bit floats, one array at a time.
#include "dsops/scalar.h"

template <class To, class From>
static void convert(const From* from, To* to, long count)
{
    for (long i = 0; i < count; ++i) to[i] = To(from[i]);
}

extern "C" {
void half_to_float(const c10::Half* from, float* to, long count) { convert(from, to, count); }
void float_to_half(const float* from, c10::Half* to, long count) { convert(from, to, count); }
void bfloat16_to_float(const c10::BFloat16* from, float* to, long count) { convert(from, to, count); }
void float_to_bfloat16(const float* from, c10::BFloat16* to, long count) { convert(from, to, count); }
}
