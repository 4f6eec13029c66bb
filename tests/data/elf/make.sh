#!/bin/sh
# Makes the ELF samples of this folder again: sh make.sh (any gcc for x86-64; the files are committed, 1-3 KB each).
#
# libc10.so       stands for torch's library: defines c10_sample
# libtorch_cpu.so needs libc10.so and defines nothing: the way to c10_sample is through it
# host.so         an extension module: needs libtorch_cpu.so and libc.so.6, calls c10_sample, GOMP_barrier, memcpy
#                 (GLIBC_2.14) and PyModule_Create2, refers weakly to maybe_sample
# avx512.so       the same module with one AVX-512 instruction in its function wide
# gpu.so          the same module with a fat binary's section, needs libcudart.so.11.0
# faulty.so       the same module: needs libcurand.so.10, calls nowhere, has a RUNPATH and a build path
# portable.so     a library of the portable tier: its ten functions, needs libc.so.6, calls memcpy (GLIBC_2.14)
# unportable.so   the same library: exports GOMP_parallel and has no dsops_call, needs libgomp.so.1, calls GOMP_barrier
set -eu
cd "$(dirname "$0")"
scratch=$(mktemp -d)
trap 'rm -r "$scratch"' EXIT

link() {
  output=$1
  shift
  gcc -shared -fPIC -O2 -nostdlib -s -fno-asynchronous-unwind-tables -fcf-protection=branch \
    -Wl,--hash-style=gnu,--build-id=none,-z,noseparate-code,-z,norelro -o "$output" -x c - -x none -L"$scratch" "$@"
  objcopy --remove-section=.comment "$output"
}

module='
#include <string.h>
void *PyModule_Create2(void *, int);
int c10_sample(int);
void GOMP_barrier(void);
extern int maybe_sample(int) __attribute__((weak));
void *PyInit_sample_op(void) {
  char from[64], to[64];
  GOMP_barrier();
  memcpy(to, from, maybe_sample ? 64 : (unsigned long)c10_sample(1));
  return PyModule_Create2(to, 1013);
}
'

echo 'int c10_sample(int x) { return x; }' | link libc10.so -Wl,-soname,libc10.so
echo '' | link libtorch_cpu.so -Wl,-soname,libtorch_cpu.so -Wl,--no-as-needed ./libc10.so
echo '' | link "$scratch/libcurand.so" -Wl,-soname,libcurand.so.10
echo '' | link "$scratch/libcudart.so" -Wl,-soname,libcudart.so.11.0
echo '' | link "$scratch/libgomp.so" -Wl,-soname,libgomp.so.1
cp libtorch_cpu.so "$scratch"

echo "$module" | link host.so -Wl,--no-as-needed -ltorch_cpu -lc
echo "$module void wide(float *x) { __asm__ volatile(\"vaddps %%zmm1, %%zmm2, %%zmm3\" ::: \"memory\"); }" |
  link avx512.so -Wl,--no-as-needed -ltorch_cpu -lc
echo "$module const char blob[64] __attribute__((section(\".nv_fatbin\"), used)) = {1};" |
  link gpu.so -Wl,--no-as-needed -ltorch_cpu -lcudart -lc
echo "$module void nowhere(void); const char *where(void) { nowhere(); return \"/build/scratch/sample.cpp\"; }" |
  link faulty.so -Wl,--no-as-needed,-rpath,/build/lib,--enable-new-dtags -ltorch_cpu -lcurand -lc

portable='
#include <string.h>
void *dsops_entry(void *to, void *from) { return memcpy(to, from, *(unsigned long *)from); }
'
for name in abi bind_openmp count failure name openmp_of released signature; do
  portable="$portable int dsops_$name(void) { return 0; }"
done
echo "$portable int dsops_call(void) { return 0; }" | link portable.so -Wl,--no-as-needed -lc
echo "$portable void GOMP_barrier(void); void GOMP_parallel(void) { GOMP_barrier(); }" |
  link unportable.so -Wl,--no-as-needed -lgomp -lc
